"""How large a slot's snapshot is and what a node needs for it, before anything is allocated.

Pure arithmetic over the model's shape: the parameters of a slot in the order of megatron-core
0.16.1, its buffers of gradients cut into buckets and data-parallel shards with the padding it puts
between them, and the tensors which `deadpool.snapshot` keeps of each piece. With megatron-core's
local layers and torch's optimizers the result is exact. Transformer Engine has its layers' norms in
another order, and its Adam, as Apex's, has no step count per piece: there it is too large by at
most 64 bytes a parameter and wrong by at most a padding at each end of a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from deadpool.arena import ALIGNMENT, METADATA_BYTES, buffer_bytes
from deadpool.protocol.placement import Grid, node_position
from deadpool.protocol.snapshots import NUM_BUFFERS
from deadpool.protocol.types import Slot

RANDOM_BYTES = 30_464
"""Of the random-number states with three states in megatron-core's tracker, on CPUs: six tensors of
5,056 bytes and two of 64. With a GPU the tracker's are smaller."""

_PARAMETER_ALIGNMENT = 64
"""Elements, from which a parameter starts in a buffer that is sharded."""
_BUCKET_ALIGNMENT = 128
"""Elements, beside the number of shards, of which a sharded bucket is a multiple."""
_BUSBW_ALIGNMENT = 1 << 16
"""The same with --ddp-pad-buckets-for-high-nccl-busbw."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A contiguous part of the model that one pipeline rank has; with virtual stages, several."""

    layers: range
    """Indices in the whole model."""
    has_embedding: bool
    has_output: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts."""

    num_experts: int
    layers: tuple[bool, ...]
    """Indexed by layer: whether its MLP is one of experts."""
    ffn_hidden_size: int
    latent_size: int
    """Width of what experts take and give; 0: hidden_size, without projections."""
    shared_ffn_hidden_size: int
    """0: no shared expert."""
    has_shared_gate: bool
    counts_tokens: bool
    """--moe-router-enable-expert-bias: two buffers of an element per expert."""
    averages_tokens: bool
    """The global auxiliary loss: one such buffer, and a scalar."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What decides about the number and the sizes of a GPT's parameters."""

    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Width of a head."""
    ffn_hidden_size: int
    is_gated: bool
    """SwiGLU or quick GeGLU: the MLP's first matrix is twice as high."""
    padded_vocab_size: int
    num_positions: int
    """Of learned position embeddings; 0 without them."""
    has_bias: bool
    """Of the linear layers."""
    has_qkv_bias: bool
    norm_has_bias: bool
    """LayerNorm has one, RMSNorm not."""
    has_qk_norm: bool
    has_output_gate: bool
    """Of attention: as much again as the queries."""
    has_softmax_offset: bool
    ties_embeddings: bool
    experts: Experts | None
    stages: tuple[tuple[Chunk, ...], ...]
    """The chunks of each pipeline rank."""
    parameter_bytes: int
    """Of an element in the model: 2 in half precision."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How the optimizer's state is cut and kept."""

    grid: Grid
    expert: int
    """Expert-parallel size."""
    expert_tensor: int
    is_distributed: bool
    """--use-distributed-optimizer."""
    bucket_size: int | None
    """Parameters; None without --overlap-grad-reduce. On the first pipeline rank's first chunk."""
    pads_for_busbw: bool
    element_bytes: tuple[int, ...]
    """Of each tensor kept for a piece: main parameter and two moments are (4, 4, 4)."""
    num_scalars: int
    """Further tensors of one element: Adam's step count."""

    @property
    def data(self) -> int:
        """Among how many slots dense parameters are sharded: context-parallel ones are in it."""
        return self.grid.data * self.grid.context

    @property
    def expert_data(self) -> int:
        """Among how many slots an expert's parameters are sharded."""
        return self.grid.world_size // (self.expert * self.expert_tensor * self.grid.pipeline)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of one slot's model."""

    numel: int
    is_expert: bool = False
    """Sharded among those with the same experts."""
    has_own_bucket: bool = False
    """A word embedding that two pipeline ranks share."""


def even_stages(num_layers: int, pipeline: int) -> tuple[tuple[Chunk, ...], ...]:
    """Stages of equally many layers, without virtual ones."""
    assert num_layers % pipeline == 0
    size = num_layers // pipeline
    return tuple(
        (
            Chunk(
                layers=range(stage * size, (stage + 1) * size),
                has_embedding=stage == 0,
                has_output=stage == pipeline - 1,
            ),
        )
        for stage in range(pipeline)
    )


def parameters(shape: ModelShape, chunk: Chunk, sharding: Sharding) -> list[Parameter]:
    """A chunk's parameters in the order of the model's `named_parameters`."""
    hidden, tensor = shape.hidden_size, sharding.grid.tensor
    vocabulary = shape.padded_vocab_size // tensor * hidden
    is_shared = shape.ties_embeddings and len(shape.stages) > 1
    found: list[Parameter] = []
    if chunk.has_embedding:
        found.append(Parameter(numel=vocabulary, has_own_bucket=is_shared))
        if shape.num_positions:
            found.append(Parameter(numel=shape.num_positions * hidden))
    for layer in chunk.layers:
        found += _layer(shape, layer, sharding)
    if chunk.has_output:
        found += _norm(shape, hidden)
        if not shape.ties_embeddings or not chunk.has_embedding:
            found.append(Parameter(numel=vocabulary, has_own_bucket=is_shared))
    return found


def _layer(shape: ModelShape, layer: int, sharding: Sharding) -> Iterator[Parameter]:
    hidden, tensor = shape.hidden_size, sharding.grid.tensor
    queries = shape.kv_channels * shape.num_attention_heads
    qkv = queries + 2 * shape.kv_channels * shape.num_query_groups
    qkv = (qkv + (queries if shape.has_output_gate else 0)) // tensor
    yield from _norm(shape, hidden)
    if shape.has_softmax_offset:
        yield Parameter(numel=shape.num_attention_heads // tensor)
    yield Parameter(numel=hidden * queries // tensor)
    if shape.has_bias:
        yield Parameter(numel=hidden)
    yield Parameter(numel=qkv * hidden)
    if shape.has_qkv_bias:
        yield Parameter(numel=qkv)
    if shape.has_qk_norm:
        yield from _norm(shape, shape.kv_channels)
        yield from _norm(shape, shape.kv_channels)
    yield from _norm(shape, hidden)
    if shape.experts is not None and shape.experts.layers[layer]:
        yield from _expert_mlp(shape, shape.experts, sharding)
    else:
        yield from _mlp(shape, shape.ffn_hidden_size // tensor, hidden)


def _expert_mlp(shape: ModelShape, experts: Experts, sharding: Sharding) -> Iterator[Parameter]:
    hidden, latent = shape.hidden_size, experts.latent_size
    yield Parameter(numel=experts.num_experts * hidden)
    if shape.has_bias:
        yield Parameter(numel=experts.num_experts)
    for height in (latent, hidden) if latent else ():
        yield Parameter(numel=hidden * latent)
        if shape.has_bias:
            yield Parameter(numel=height)
    width = experts.ffn_hidden_size // sharding.expert_tensor
    for _ in range(experts.num_experts // sharding.expert):
        yield from _mlp(shape, width, latent or hidden, is_expert=sharding.expert > 1)
    if experts.shared_ffn_hidden_size:
        if experts.has_shared_gate:
            yield Parameter(numel=hidden)
        yield from _mlp(shape, experts.shared_ffn_hidden_size // sharding.grid.tensor, hidden)


def _norm(shape: ModelShape, width: int) -> list[Parameter]:
    return [Parameter(numel=width)] * (2 if shape.norm_has_bias else 1)


def _mlp(
    shape: ModelShape, width: int, outer: int, *, is_expert: bool = False
) -> Iterator[Parameter]:
    inner = width * (2 if shape.is_gated else 1)
    for numel, bias in ((inner * outer, inner), (outer * width, outer)):
        yield Parameter(numel=numel, is_expert=is_expert)
        if shape.has_bias:
            yield Parameter(numel=bias, is_expert=is_expert)


def count_parameters(shape: ModelShape, sharding: Sharding, stage: int) -> int:
    """Of one slot of a pipeline rank."""
    return sum(p.numel for chunk in shape.stages[stage] for p in parameters(shape, chunk, sharding))


def cut_into_shards(
    found: Sequence[Parameter], num_shards: int, bucket_size: int | None, *, pads_for_busbw: bool
) -> list[list[int]]:
    """Numbers of elements of the pieces of parameters in each shard of a sharded buffer.

    As megatron-core 0.16.1's `_ParamAndGradBuffer`: parameters from the last to the first, each
    from a multiple of 64 elements; a bucket ends after the parameter that brings it to
    `bucket_size`, and around an embedding that two pipeline ranks share, and is padded to a
    multiple of 128 (or of 65,536) and of the number of shards. Every bucket is cut into equal
    shards.
    """
    divisor = math.lcm(num_shards, _BUCKET_ALIGNMENT, _BUSBW_ALIGNMENT if pads_for_busbw else 1)
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    start = end = 0
    inside: list[tuple[int, int]] = []

    def close() -> None:
        nonlocal start, end, inside
        bucket_end = _round_up(end, divisor)
        size = (bucket_end - start) // num_shards
        for first, last in inside:
            for shard in range((first - start) // size, (last - 1 - start) // size + 1):
                low, high = start + shard * size, start + (shard + 1) * size
                shards[shard].append(min(last, high) - max(first, low))
        start = end = bucket_end
        inside = []

    for parameter in reversed(found):
        if parameter.has_own_bucket and inside:
            end = _round_up(end, _PARAMETER_ALIGNMENT)
            close()
        first = _round_up(end, _PARAMETER_ALIGNMENT)
        end = first + parameter.numel
        inside.append((first, end))
        is_full = bucket_size is not None and end - start >= bucket_size
        if is_full or parameter.has_own_bucket:
            close()
    if inside:
        close()
    return shards


def snapshot_bytes(shape: ModelShape, sharding: Sharding) -> tuple[int, ...]:
    """Payload bytes of each slot's snapshot, indexed by slot."""
    stages = [_stage_bytes(shape, sharding, stage) for stage in range(sharding.grid.pipeline)]
    sizes = []
    for slot in map(Slot, range(sharding.grid.world_size)):
        dense, expert, fixed = stages[pipeline_rank(sharding.grid, slot)]
        if sharding.is_distributed:
            data, expert_data = shard_indices(sharding, slot)
        else:
            data = expert_data = 0
        sizes.append(fixed + dense[data] + expert[expert_data])
    return tuple(sizes)


def pipeline_rank(grid: Grid, slot: Slot) -> int:
    """The pipeline stage of a slot."""
    inner = grid.tensor * grid.context
    return (
        slot // inner % grid.pipeline if grid.pipeline_before_data else slot // inner // grid.data
    )


def shard_indices(sharding: Sharding, slot: Slot) -> tuple[int, int]:
    """Which shard of the dense and which of the expert parameters a slot has: its place in the
    data-parallel groups of megatron-core, context-parallel ranks innermost."""
    grid = sharding.grid
    stages = grid.pipeline if grid.pipeline_before_data else 1
    context = slot // grid.tensor % grid.context
    data = slot // (grid.tensor * grid.context * stages) % grid.data
    expert_data = slot // (sharding.expert_tensor * sharding.expert * stages)
    return context + grid.context * data, expert_data % sharding.expert_data


def _stage_bytes(
    shape: ModelShape, sharding: Sharding, stage: int
) -> tuple[list[int], list[int], int]:
    """Bytes of the dense shards, of the expert shards, and of what all slots of the stage have."""
    dense, expert = [0] * sharding.data, [0] * sharding.expert_data
    fixed = METADATA_BYTES + RANDOM_BYTES
    for index, chunk in enumerate(shape.stages[stage]):
        found = parameters(shape, chunk, sharding)
        fixed += _router_buffer_bytes(shape, chunk)
        bucket_size = sharding.bucket_size if stage == 0 and index == 0 else None
        for is_expert, sizes in ((False, dense), (True, expert)):
            buffer = [p for p in found if p.is_expert is is_expert]
            shards = [[p.numel for p in buffer]]
            if sharding.is_distributed:
                shards = cut_into_shards(
                    buffer, len(sizes), bucket_size, pads_for_busbw=sharding.pads_for_busbw
                )
            for shard, pieces in enumerate(shards):
                sizes[shard] += sum(_piece_bytes(sharding, numel) for numel in pieces)
    return dense, expert, fixed


def _router_buffer_bytes(shape: ModelShape, chunk: Chunk) -> int:
    experts = shape.experts
    if experts is None:
        return 0
    counts = _aligned(experts.num_experts * shape.parameter_bytes)
    per_layer = 2 * counts if experts.counts_tokens else 0
    per_layer += counts + ALIGNMENT if experts.averages_tokens else 0
    return per_layer * sum(experts.layers[layer] for layer in chunk.layers)


def _piece_bytes(sharding: Sharding, numel: int) -> int:
    tensors = sum(_aligned(numel * size) for size in sharding.element_bytes)
    return tensors + sharding.num_scalars * ALIGNMENT


def _aligned(num_bytes: int) -> int:
    return _round_up(num_bytes, ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """Host memory of the node at one place of the grid, in bytes."""

    place: int
    slots: tuple[Slot, ...]
    """That it trains."""
    held: tuple[Slot, ...]
    """Whose replicas it keeps, one entry a replica."""
    own_bytes: int
    """The arenas of its slots, all buffers."""
    replica_bytes: int
    """All buffers."""
    reserve_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.own_bytes + self.replica_bytes + self.reserve_bytes


def node_needs(
    grid: Grid,
    sizes: Sequence[int],
    holders: Sequence[Sequence[Slot]],
    *,
    reserve_bytes_per_rank: int,
) -> tuple[NodeNeed, ...]:
    """What each place of the grid needs, indexed by place. A spare needs what its place will.

    sizes: payload bytes by slot. holders: by slot, the slots whose members keep its replicas; as
    many as there are replicas.
    """
    held: list[list[Slot]] = [[] for _ in range(grid.num_nodes)]
    for slot, kept_by in enumerate(holders):
        for holder in kept_by:
            held[node_position(grid, holder)].append(Slot(slot))
    needs = []
    for place in range(grid.num_nodes):
        first = place * grid.ranks_per_node
        slots = tuple(map(Slot, range(first, first + grid.ranks_per_node)))
        needs.append(
            NodeNeed(
                place=place,
                slots=slots,
                held=tuple(held[place]),
                own_bytes=sum(arena_bytes(sizes[slot]) for slot in slots),
                replica_bytes=NUM_BUFFERS * sum(sizes[slot] for slot in held[place]),
                reserve_bytes=reserve_bytes_per_rank * grid.ranks_per_node,
            )
        )
    return tuple(needs)


def arena_bytes(payload_bytes: int) -> int:
    """Of the memory of one slot, all buffers with their headers."""
    return NUM_BUFFERS * buffer_bytes(payload_bytes)
