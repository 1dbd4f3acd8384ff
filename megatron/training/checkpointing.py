"""Saving and loading through megatron-core's `dist_checkpointing`, in Megatron-LM's format."""

from __future__ import annotations

import copy
import copyreg
import random
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.transformer.enums import AttnBackend

from megatron.training import checkpoint_folder
from megatron.training.checkpoint_fit import checkpoint_to_load, same_grid
from megatron.training.checkpoint_writer import InProcessSaveStrategy
from megatron.training.model import unwrap
from megatron.training.optimizer import (
    allocate_torch_adam_state,
    restore_torch_adam_steps,
)
from megatron.training.output import print_rank_0
from megatron.training.state import TrainState

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer

# Some releases of Python 3.11 (Debian 12's 3.11.2) pickle members of enums by way of getattr, which
# torch's safe loading refuses.
copyreg.pickle(AttnBackend, lambda member: (AttnBackend, (member.value,)))

CHECKPOINT_VERSION = 3.0
"""Megatron-LM's number for this layout."""


def save_checkpoint(trainer: Trainer) -> None:
    """Write the state after `trainer.state.iteration` and make it the latest. All ranks call it.

    Raises OSError when the disk is full or not writable; the last checkpoint stays the latest then.
    """
    args, iteration = trainer.args, trainer.state.iteration
    rank = torch.distributed.get_rank()
    print_rank_0(
        f"[{_now()}] saving checkpoint at iteration {iteration:7d} to {args.save} "
        f"in {args.ckpt_format} format"
    )
    if rank == 0:
        checkpoint_folder.prepare_partial(args.save, iteration)
    torch.distributed.barrier()
    metadata = _content_metadata(args)
    strategy: Any = InProcessSaveStrategy()
    if args.ckpt_fully_parallel_save:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(strategy, group, False)
    stored = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    dist_checkpointing.save(
        _state_to_save(trainer, metadata),
        str(checkpoint_folder.partial_path(args.save, iteration)),
        strategy,
        preprocess_common_before_consistancy_check=_comparable,
        content_metadata=stored,
    )
    torch.distributed.barrier()
    if rank == 0:
        _publish(args, iteration)
    torch.distributed.barrier()


def _publish(args: Namespace, iteration: int) -> None:
    previous = checkpoint_folder.latest_iteration(args.save)
    checkpoint_folder.publish(args.save, iteration)
    print_rank_0(
        f"  [{_now()}] successfully saved checkpoint from iteration {iteration:7d} to {args.save} "
        f"[ t 1/{args.tensor_model_parallel_size}, p 1/{args.pipeline_model_parallel_size} ]"
    )
    if args.save_retain_interval is not None and previous != iteration:
        checkpoint_folder.remove_between(
            args.save, previous, retain_interval=args.save_retain_interval
        )


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")


def _content_metadata(args: Namespace) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if args.use_distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    return metadata


def _state_to_save(trainer: Trainer, metadata: dict[str, Any]) -> dict[str, Any]:
    args, state = trainer.args, trainer.state
    contents = _model_contents(trainer.model, metadata)
    contents |= {
        "args": _stored_args(args, state),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.floating_point_operations,
        "train_state": state.to_dict(),
    }
    if not args.no_save_optim:
        contents["optimizer"] = trainer.optimizer.sharded_state_dict(contents, metadata=metadata)
        contents["opt_param_scheduler"] = trainer.scheduler.state_dict()
    if not args.no_save_rng:
        contents["rng_state"] = _sharded_rng_state(args)
    return contents


def _model_contents(model: list[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    if len(model) == 1:
        return {"model": unwrap(model[0]).sharded_state_dict(metadata=metadata)}
    return {
        f"model{index}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(model)
    }


def _stored_args(args: Namespace, state: TrainState) -> Namespace:
    """What Megatron-LM keeps in its arguments: the flags and the counters of samples.

    Reading a checkpoint unpickles known types alone, so flags of other types are left out; so are
    a rank's own.
    """
    rank_own = {"rank", "local_rank", "typed", "notes"}
    stored = Namespace(
        **{
            name: value
            for name, value in vars(args).items()
            if name not in rank_own and _is_loadable(value)
        }
    )
    stored.iteration = state.iteration
    stored.consumed_train_samples = state.consumed_train_samples
    stored.skipped_train_samples = state.skipped_train_samples
    stored.consumed_valid_samples = state.consumed_valid_samples
    return stored


def _is_loadable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_loadable(item) for item in value)
    if isinstance(value, dict):
        return all(_is_loadable(item) for item in (*value.keys(), *value.values()))
    return value is None or type(value) in (str, int, float, bool, torch.dtype, AttnBackend)


def _comparable(common: dict[str, Any]) -> dict[str, Any]:
    """What of the unsharded state must agree on all ranks: losses are known on some alone."""
    kept = {key: value for key, value in common.items() if key not in ("args", "train_state")}
    return copy.deepcopy(kept)


def _sharded_rng_state(args: Namespace) -> ShardedObject:
    """Generator states by (pipeline, tensor) rank, as Megatron-LM stores them.

    Data-parallel ranks draw alike and store one copy, unless experts make them differ.
    """
    mine: Any = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    states = [mine]
    if args.data_parallel_random_init and args.data_parallel_size > 1:
        states = [None] * args.data_parallel_size
        torch.distributed.all_gather_object(
            states, mine, group=parallel_state.get_data_parallel_group()
        )
    shape = [
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    ]
    place = [
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    ]
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        shape.append(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
        place.append(replica)
        replica = 0
    return ShardedObject("rng_state", states, tuple(shape), tuple(place), replica_id=replica)


def load_checkpoint(trainer: Trainer) -> bool:
    """Load what `--load` names into model, optimizer, scheduler, generators and counters.

    All ranks call it together. False: there is none, and training starts from its initial weights.
    """
    args = trainer.args
    found = checkpoint_to_load(args)
    if found is None:
        return False
    path, iteration = found
    common = dist_checkpointing.load_common_state_dict(str(path))
    stored = common.get("args", Namespace())
    weights_only = args.finetune or iteration == checkpoint_folder.RELEASE
    with_optimizer = not (
        weights_only or args.no_load_optim or getattr(stored, "no_save_optim", None)
    )
    with_rng = not (weights_only or args.no_load_rng or getattr(stored, "no_save_rng", None))
    with_rng = with_rng and same_grid(args, stored)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    loaded = _read(trainer, path, metadata, with_optimizer=with_optimizer, with_rng=with_rng)
    _load_weights(trainer, loaded)
    if with_optimizer:
        with torch.no_grad():
            trainer.optimizer.load_state_dict(loaded["optimizer"])
        restore_torch_adam_steps(trainer.optimizer)
        trainer.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    elif args.fp16 or args.bf16:
        trainer.optimizer.reload_model_params()
    if with_rng:
        _restore_rng(args, loaded["rng_state"])
    trainer.state = TrainState() if weights_only else _stored_state(loaded, stored)
    update_num_microbatches(trainer.state.consumed_train_samples, consistency_check=False)
    torch.distributed.barrier()
    print_rank_0(
        f"  successfully loaded checkpoint from {args.load} "
        f"[ t 1/{args.tensor_model_parallel_size}, p 1/{args.pipeline_model_parallel_size} ] "
        f"at iteration {trainer.state.iteration}"
    )
    return True


def _read(
    trainer: Trainer,
    path: Path,
    metadata: dict[str, Any],
    *,
    with_optimizer: bool,
    with_rng: bool,
) -> dict[str, Any]:
    args = trainer.args
    wanted = _model_contents(trainer.model, metadata)
    if with_optimizer:
        allocate_torch_adam_state(trainer.optimizer)
        wanted["optimizer"] = trainer.optimizer.sharded_state_dict(
            wanted, metadata=metadata, is_loading=True
        )
    if with_rng:
        wanted["rng_state"] = _sharded_rng_state(args)
    strategy = get_default_load_sharded_strategy(str(path))
    if args.ckpt_fully_parallel_load:
        strategy = FullyParallelLoadStrategyWrapper(strategy, metadata["dp_cp_group"])
    return dist_checkpointing.load(wanted, str(path), strategy, strict=args.dist_ckpt_strictness)


def _load_weights(trainer: Trainer, loaded: dict[str, Any]) -> None:
    for index, chunk in enumerate(trainer.model):
        name = "model" if len(trainer.model) == 1 else f"model{index}"
        unwrap(chunk).load_state_dict(loaded[name], strict=True)


def _restore_rng(args: Namespace, states: list[Any]) -> None:
    index = parallel_state.get_data_parallel_rank() if args.data_parallel_random_init else 0
    state = states[index]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    torch.cuda.set_rng_state(state["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(dict(state["rng_tracker_states"]))


def _stored_state(loaded: dict[str, Any], stored: Namespace) -> TrainState:
    """Ours if we wrote the checkpoint, else what Megatron-LM keeps in its arguments."""
    if "train_state" in loaded:
        return TrainState.from_dict(loaded["train_state"])
    return TrainState(
        iteration=loaded["iteration"],
        consumed_train_samples=getattr(stored, "consumed_train_samples", 0),
        skipped_train_samples=getattr(stored, "skipped_train_samples", 0),
        consumed_valid_samples=getattr(stored, "consumed_valid_samples", 0),
        floating_point_operations=loaded.get("num_floating_point_operations_so_far", 0.0),
    )
