"""Prints the table of docs/memory.md: `python tools/memory_table.py`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deadpool.budget import (
    ModelShape,
    Sharding,
    count_parameters,
    even_stages,
    node_needs,
    snapshot_bytes,
)
from deadpool.node_memory import RESERVE_BYTES_CUDA
from deadpool.protocol.placement import Grid, choose_holders

GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Of the machine's documentation."""

    name: str
    ranks_per_node: int
    host_bytes: int


PERLMUTTER = Machine(name="Perlmutter", ranks_per_node=4, host_bytes=256 * GIB)
VISTA = Machine(name="Vista", ranks_per_node=1, host_bytes=120 * 10**9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A published GPT, in half precision."""

    name: str
    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int
    positions: int
    """0: rotary; then also SwiGLU, RMSNorm, no biases and an output layer of its own."""


GPT2 = {"vocabulary": 50_257, "positions": 1024}
LLAMA = {"vocabulary": 32_000, "positions": 0}
SMALL = Model(name="GPT-2 small", hidden=768, layers=12, heads=12, ffn=3072, **GPT2)
XL = Model(name="GPT-2 XL", hidden=1600, layers=48, heads=25, ffn=6400, **GPT2)
B7 = Model(name="7B", hidden=4096, layers=32, heads=32, ffn=11_008, **LLAMA)
B13 = Model(name="13B", hidden=5120, layers=40, heads=40, ffn=13_824, **LLAMA)
B65 = Model(name="65B", hidden=8192, layers=80, heads=64, ffn=22_016, **LLAMA)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row."""

    model: Model
    machine: Machine
    nodes: int
    tensor: int = 1
    pipeline: int = 1
    is_distributed: bool = True


CASES = (
    Case(model=SMALL, machine=PERLMUTTER, nodes=2),
    Case(model=SMALL, machine=PERLMUTTER, nodes=2, is_distributed=False),
    Case(model=SMALL, machine=VISTA, nodes=4),
    Case(model=XL, machine=PERLMUTTER, nodes=4),
    Case(model=XL, machine=PERLMUTTER, nodes=4, is_distributed=False),
    Case(model=XL, machine=VISTA, nodes=8),
    Case(model=B7, machine=PERLMUTTER, nodes=8, tensor=4),
    Case(model=B7, machine=PERLMUTTER, nodes=8, tensor=4, is_distributed=False),
    Case(model=B7, machine=VISTA, nodes=16),
    Case(model=B13, machine=PERLMUTTER, nodes=16, tensor=4),
    Case(model=B13, machine=VISTA, nodes=32),
    Case(model=B65, machine=PERLMUTTER, nodes=64, tensor=4, pipeline=8),
    Case(model=B65, machine=PERLMUTTER, nodes=8, tensor=4, pipeline=8),
    Case(model=B65, machine=VISTA, nodes=128, tensor=1, pipeline=16),
)
HEAD = (
    "model", "parameters", "machine", "nodes", "grid", "distributed optimizer",
    "a slot's snapshot", "a node needs", "host memory", "fits",
)  # fmt: skip


def shape_of(model: Model, tensor: int, pipeline: int) -> ModelShape:
    is_gpt2 = model.positions > 0
    multiple = 128 * tensor
    return ModelShape(
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.heads,
        kv_channels=model.hidden // model.heads,
        ffn_hidden_size=model.ffn,
        is_gated=not is_gpt2,
        padded_vocab_size=-(-model.vocabulary // multiple) * multiple,
        num_positions=model.positions,
        has_bias=is_gpt2,
        has_qkv_bias=is_gpt2,
        norm_has_bias=is_gpt2,
        has_qk_norm=False,
        has_output_gate=False,
        has_softmax_offset=False,
        ties_embeddings=is_gpt2,
        experts=None,
        stages=even_stages(model.layers, pipeline),
        parameter_bytes=2,
    )


def sharding_of(case: Case) -> Sharding:
    ranks = case.machine.ranks_per_node
    return Sharding(
        grid=Grid(
            world_size=case.nodes * ranks,
            ranks_per_node=ranks,
            tensor=case.tensor,
            context=1,
            pipeline=case.pipeline,
            pipeline_before_data=False,
        ),
        expert=1,
        expert_tensor=1,
        is_distributed=case.is_distributed,
        bucket_size=None,
        pads_for_busbw=False,
        element_bytes=(4, 4, 4),
        num_scalars=1,
    )


def row(case: Case) -> tuple[str, ...]:
    shape, sharding = shape_of(case.model, case.tensor, case.pipeline), sharding_of(case)
    grid, sizes = sharding.grid, snapshot_bytes(shape, sharding)
    needs = node_needs(
        grid, sizes, choose_holders(grid, 1), reserve_bytes_per_rank=RESERVE_BYTES_CUDA
    )
    need = max(n.num_bytes for n in needs)
    alone = dataclasses.replace(sharding, grid=dataclasses.replace(grid, tensor=1))
    total = count_parameters(
        dataclasses.replace(shape, stages=even_stages(case.model.layers, 1)), alone, 0
    )
    return (
        case.model.name,
        f"{total / 1e9:.2f} B",
        case.machine.name,
        str(case.nodes),
        f"tp {case.tensor}, pp {case.pipeline}, dp {grid.data}",
        "yes" if case.is_distributed else "no",
        f"{max(sizes) / GIB:.2f} GiB",
        f"{need / GIB:.1f} GiB",
        f"{case.machine.host_bytes / GIB:.0f} GiB",
        "yes" if need <= case.machine.host_bytes else "no",
    )


def table() -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *(row(case) for case in CASES)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
