"""The budget against the payloads that are really laid out, slot by slot."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.parallel_state import RankGenerator

from deadpool.arena import Arena
from deadpool.budget import Sharding, arena_bytes, node_needs, pipeline_rank, shard_indices
from deadpool.config import add_arguments
from deadpool.groups import GroupRegistry
from deadpool.integrations.memory import budget_of
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Slot
from deadpool.snapshot import Snapshotter
from megatron.training import device
from megatron.training.arguments import (
    ddp_config_from_args,
    optimizer_config_from_args,
    parse_args,
    transformer_config_from_args,
    validate_args,
)
from megatron.training.initialize import (
    adopt_rank,
    create_process_groups,
    initialize_core,
    seed_everything,
)
from megatron.training.model import build_model
from megatron.training.optimizer import build_optimizer
from megatron.training.pretrain import check_inputs
from megatron.training.rng import collect_rng_state, restore_rng_state

RunRanks = Callable[..., list[Any]]

FLAGS = """
    --num-layers 4 --hidden-size 48 --num-attention-heads 6 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 24 --train-iters 5
    --lr 1e-2 --tokenizer-type NullTokenizer --vocab-size 100 --transformer-impl local
    --distributed-backend gloo --eval-iters 0 --num-workers 0 --mock-data --split 100,0,0
""".split()
MOE = "--num-experts 4 --moe-ffn-hidden-size 40 --disable-bias-linear"
SHARD = "--use-distributed-optimizer"
PIPELINE = "--pipeline-model-parallel-size"

CONFIGURATIONS = {
    "plain": (2, ""),
    "plain-bf16": (2, "--bf16"),
    "plain-sgd": (2, "--optimizer sgd"),
    "sgd-without-momentum": (2, "--optimizer sgd --sgd-momentum 0"),
    "sharded": (3, SHARD),
    "sharded-bf16-odd-vocabulary": (2, f"{SHARD} --bf16 --make-vocab-size-divisible-by 7"),
    "sharded-fp16": (2, f"{SHARD} --fp16"),
    "tensor": (4, f"{SHARD} --tensor-model-parallel-size 2"),
    "tensor-plain-untied": (
        2, "--tensor-model-parallel-size 2 --untie-embeddings-and-output-weights",
    ),
    "pipeline-tied": (6, f"{SHARD} --bf16 {PIPELINE} 2"),
    "pipeline-tied-plain": (4, f"{PIPELINE} 4"),
    "pipeline-untied-first": (
        8, f"{SHARD} {PIPELINE} 4 --untie-embeddings-and-output-weights --use-tp-pp-dp-mapping",
    ),
    "uneven-pipeline": (
        4, f"{SHARD} {PIPELINE} 2 --decoder-first-pipeline-num-layers 1",
    ),
    "virtual": (4, f"{SHARD} {PIPELINE} 2 --num-layers-per-virtual-pipeline-stage 1"),
    "layout": (2, f"{SHARD} {PIPELINE} 2 --pipeline-model-parallel-layout Et|tt|t|L"),
    "llama": (
        2,
        f"{SHARD} --bf16 --swiglu --disable-bias-linear --group-query-attention "
        "--num-query-groups 2 --untie-embeddings-and-output-weights --normalization RMSNorm "
        "--position-embedding-type rope",
    ),
    "qkv-bias-and-norms": (
        2, f"{SHARD} --disable-bias-linear --add-qkv-bias --qk-layernorm --kv-channels 10",
    ),
    "output-gate": (2, f"{SHARD} --attention-output-gate"),
    "softmax-offset": (2, f"{SHARD} --softmax-type learnable"),
    "shared-expert-gate": (
        2, f"{SHARD} {MOE} --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate",
    ),
    "buckets": (2, f"{SHARD} --bf16 --overlap-grad-reduce --ddp-bucket-size 5000"),
    "number-of-buckets": (4, f"{SHARD} {PIPELINE} 2 --overlap-grad-reduce --ddp-num-buckets 3"),
    "busbw": (2, f"{SHARD} --ddp-pad-buckets-for-high-nccl-busbw"),
    "experts": (2, f"{SHARD} {MOE}"),
    "experts-plain": (2, f"{MOE} --expert-model-parallel-size 2"),
    "expert-parallel": (
        8,
        f"{SHARD} {MOE} --swiglu --bf16 --expert-model-parallel-size 2 {PIPELINE} 2 "
        "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 24",
    ),
    "experts-pipeline-before-data": (
        4, f"{SHARD} {MOE} {PIPELINE} 2 --use-tp-pp-dp-mapping --moe-layer-freq [1,0,0,1]",
    ),
    "expert-bias": (
        4,
        f"{SHARD} --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    ),
    "global-auxiliary-loss": (
        2,
        f"{MOE} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
    ),
}  # fmt: skip


def read_args(flags: list[str], world_size: int, context: int) -> Any:
    args = parse_args([*FLAGS, *flags], add_arguments)
    validate_args(args, world_size)
    check_inputs(args)
    args.context_parallel_size = context
    args.data_parallel_size //= context
    return args


def laid_out_and_computed(
    world_size: int, flags: list[str], context: int = 1
) -> list[tuple[int, int]]:
    """(bytes of the payload that each slot lays out, bytes computed), without any peer.

    context: of the groups alone; a layer for it needs Transformer Engine.
    """
    device.install(0)
    found = []
    for slot in range(world_size):
        os.environ.update(RANK=str(slot), WORLD_SIZE=str(world_size))
        args = read_args(flags, world_size, context)
        budget = budget_of(args, 1)
        adopt_rank(args)
        initialize_core(args)
        with GroupRegistry().recording():
            create_process_groups(args, store=dist.HashStore(), rank=slot, world_size=world_size)
        seed_everything(args)
        args.context_parallel_size = 1
        config = transformer_config_from_args(args)
        args.context_parallel_size = context
        model = build_model(args, config, ddp_config_from_args)
        optimizer = build_optimizer(args, optimizer_config_from_args(args), model, alone=True)
        snapshots = Snapshotter(
            arena=Arena.create(),
            slot=Slot(slot),
            model=model,
            optimizer=optimizer,
            collect_random=collect_rng_state,
            restore_random=restore_rng_state,
            on_captured=lambda iteration, buffer: None,
            on_halfway=lambda iteration: None,
        )
        found.append((snapshots.payload_bytes, budget.sizes[slot]))
        parallel_state.destroy_model_parallel()
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_snapshot_bytes_of_every_slot_are_those_laid_out(run_ranks: RunRanks, name: str) -> None:
    world_size, flags = CONFIGURATIONS[name]
    (found,) = run_ranks(1, laid_out_and_computed, world_size, flags.split())
    assert [computed for _, computed in found] == [true for true, _ in found]


def test_snapshot_bytes_with_context_parallel_groups_are_those_laid_out(
    run_ranks: RunRanks,
) -> None:
    flags = f"{SHARD} --bf16 {PIPELINE} 2".split()
    (found,) = run_ranks(1, laid_out_and_computed, 8, flags, 2)
    assert [computed for _, computed in found] == [true for true, _ in found]
    assert len({true for true, _ in found}) > 2  # Shards that differ were told apart.


def sharding_of_sizes(grid: Grid, expert: int) -> Sharding:
    return Sharding(
        grid=grid, expert=expert, expert_tensor=grid.tensor, is_distributed=True,
        bucket_size=None, pads_for_busbw=False, element_bytes=(4, 4, 4), num_scalars=1,
    )  # fmt: skip


@pytest.mark.parametrize("pipeline_before_data", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("context", [1, 2])
def test_places_in_groups_are_megatrons(
    tensor: int, context: int, pipeline_before_data: bool
) -> None:
    grid = Grid(
        world_size=24 * tensor * context, ranks_per_node=1, tensor=tensor, context=context,
        pipeline=3, pipeline_before_data=pipeline_before_data,
    )  # fmt: skip
    order = "tp-cp-ep-pp-dp" if pipeline_before_data else "tp-cp-ep-dp-pp"
    sizes = {"tp": tensor, "pp": 3, "order": order}
    dense = RankGenerator(ep=1, dp=8, cp=context, **sizes)
    for group in dense.get_ranks("dp-cp"):
        sharding = sharding_of_sizes(grid, 1)
        assert [shard_indices(sharding, Slot(s))[0] for s in group] == list(range(8 * context))
    for group in dense.get_ranks("pp"):
        assert [pipeline_rank(grid, Slot(s)) for s in group] == [0, 1, 2]
    expert = RankGenerator(ep=4, dp=2 * context, cp=1, **sizes)
    for group in expert.get_ranks("dp"):
        sharding = sharding_of_sizes(grid, 4)
        assert [shard_indices(sharding, Slot(s))[1] for s in group] == list(range(2 * context))


def test_node_needs_count_own_buffers_and_replicas_held_and_reserve() -> None:
    grid = Grid(
        world_size=4, ranks_per_node=2, tensor=2, context=1, pipeline=1,
        pipeline_before_data=False,
    )  # fmt: skip
    sizes = (10_000, 20_000, 30_000, 40_000)
    one = node_needs(grid, sizes, [(Slot(2),), (Slot(3),), (Slot(0),), (Slot(1),)],
                     reserve_bytes_per_rank=7)  # fmt: skip
    assert [need.slots for need in one] == [(0, 1), (2, 3)]
    assert [need.held for need in one] == [(2, 3), (0, 1)]
    assert [need.replica_bytes for need in one] == [2 * 70_000, 2 * 30_000]
    assert [need.reserve_bytes for need in one] == [14, 14]
    for need, own in zip(one, ([10_000, 20_000], [30_000, 40_000]), strict=True):
        headers_and_pages = 2 * len(own) * 2 * 4096
        assert 2 * sum(own) < need.own_bytes <= 2 * sum(own) + headers_and_pages
        assert need.num_bytes == need.own_bytes + need.replica_bytes + need.reserve_bytes
    holders = [(Slot(2), Slot(3)), (Slot(3),), (Slot(0), Slot(1)), (Slot(1),)]
    two = node_needs(grid, sizes, holders, reserve_bytes_per_rank=0)
    assert [need.replica_bytes for need in two] == [2 * 100_000, 2 * 40_000]


def test_arena_bytes_are_what_an_arena_allocates() -> None:
    for payload_bytes in (1, 4096, 4097, 123_456):
        arena = Arena.create()
        arena.resize(payload_bytes)
        assert os.fstat(arena.descriptor).st_size == arena_bytes(payload_bytes)
        os.close(arena.descriptor)
