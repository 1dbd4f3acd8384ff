"""Installs the `deadpool` packages and our part of the `megatron` namespace.

`megatron/` has no `__init__.py`: PyPI's megatron-core brings `megatron.core`, this repository
`megatron.training`. Wheels of megatron-core from 0.17 on ship a `megatron.training` of their own,
hence the upper bound.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

setup(
    name="deadpool",
    version="0.1.0",
    description="Megatron training that a dead node does not stop",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10,<3.13",
    packages=find_namespace_packages(
        include=["deadpool", "deadpool.*", "megatron.training", "megatron.training.*"]
    ),
    install_requires=[
        "einops>=0.8",
        "megatron-core>=0.16,<0.17",
        "msgspec>=0.19",
        "numpy>=2",
        "psutil>=6",
        "sentencepiece>=0.2",
        "tensorboard>=2.18",
        "tokenizers>=0.21",
        "torch>=2.6",
        "xxhash>=3.5",
    ],
    extras_require={
        "demo": ["matplotlib>=3.9"],
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12"],
        "mpi": ["mpi4py>=4.1"],
        "test": [
            "hypothesis>=6.100",
            "mpi4py>=4.1",
            "mpich>=4.3",
            "mypy>=1.15",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "ruff>=0.12",
        ],
    },
)
