"""Flags of the model's shape, its kernels and its initialization that no dataclass carries."""

from __future__ import annotations

from megatron.training.arguments.flag import Flag, off_switch, switch, value

MODEL: tuple[Flag, ...] = (
    switch("--group-query-attention", "share keys and values among heads: see --num-query-groups"),
    value("--max-position-embeddings", int, None, "longest sequence that has a position"),
    value(
        "--position-embedding-type",
        str,
        "learned_absolute",
        "how a token knows its position",
        choices=("learned_absolute", "rope", "mrope", "relative", "none"),
    ),
    switch("--use-rotary-position-embeddings", "older spelling of --position-embedding-type rope"),
    off_switch(
        "--no-position-embedding",
        "add_position_embedding",
        "older spelling: only accepted beside --position-embedding-type rope",
    ),
    value("--rope-type", str, None, "kind of rotary embedding", choices=("rope", "yarn")),
    value("--rotary-base", int, 10000, "base of the rotary angles"),
    value("--rotary-percent", float, 1.0, "share of each head's width that is rotated"),
    switch("--use-rope-scaling", "stretch rotary positions as Llama 3.1 does"),
    value(
        "--make-vocab-size-divisible-by",
        int,
        128,
        "the embedding gets rows up to a multiple of this times the tensor-parallel size",
    ),
    switch("--squared-relu", "squared ReLU in the MLP instead of GeLU"),
    switch("--swiglu", "gated MLP with SiLU instead of GeLU"),
    switch("--quick-geglu", "gated MLP with quick GeLU"),
    switch("--untie-embeddings-and-output-weights", "an output layer with weights of its own"),
    switch("--no-persist-layer-norm", "do not use the persistent fused LayerNorm kernel"),
    off_switch("--no-bias-gelu-fusion", "bias_gelu_fusion", "compute bias and GeLU in two steps"),
    off_switch(
        "--no-bias-swiglu-fusion", "bias_swiglu_fusion", "compute bias and SwiGLU in two steps"
    ),
    switch("--disable-jit-fuser", "run megatron-core's fused element-wise code without a compiler"),
    switch(
        "--use-mcore-models",
        "accepted for old scripts: this driver has no other models",
        dest="deprecated_use_mcore_models",
    ),
)

INITIALIZATION: tuple[Flag, ...] = (
    value("--seed", int, 1234, "seed of Python, numpy, torch and the parallel generators"),
    switch("--data-parallel-random-init", "each data-parallel rank starts from a seed of its own"),
    switch("--te-rng-tracker", "Transformer Engine's generator instead of megatron-core's"),
    switch("--init-method-xavier-uniform", "Xavier-uniform weights instead of normal ones"),
)
