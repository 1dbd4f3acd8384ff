"""Bring megatron-core back to 'between iterations' after an exception anywhere inside one.

What an interrupted iteration leaves behind, found by reading megatron-core 0.16.1:

- DDP: gradients in the buffers and in `.grad`, handles of collectives that will never finish,
  counts of gradients that are ready, `is_last_microbatch` (a `no_sync` context that nobody left),
  forward pre-hooks, `force_all_reduce`.
- The configuration: the interleaved schedule and evaluation set functions and timers aside.
- Mixture of experts: trackers of auxiliary losses, token counts of this batch.
- The rerun state machine's phase; a deferred embedding's activations; timers that run.
- Modules left in evaluation mode, tensors kept as a stage's input.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron.training.model import unwrap


def release_frames(error: BaseException) -> None:
    """Drop what the frames of `error` and of the errors behind it keep alive.

    Frames hold tensors, handles of collectives and suspended `no_sync` generators; a generator
    that is closed later would switch gradient synchronisation on in the middle of an iteration.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]


def discard_gradients(model: list[Any], optimizer: Any) -> None:
    """Forget the gradients of a partial iteration and every collective on them.

    Bucket groups return to the state of a first batch: then all ranks of a group, those that just
    joined included, issue the same collectives in the same order.
    """
    for chunk in model:
        chunk.force_all_reduce = False
        for parameter in chunk.parameters():
            parameter.grad = None
        for group in bucket_groups(chunk):
            group.grad_reduce_handle = None
            group.param_gather_handle = None
            group.param_gather_dispatched = False
            group.is_first_batch = True
            group.golden_per_param_grad_ready_counts = {}
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        found_inf = getattr(one, "found_inf", None)
        if found_inf is not None:
            found_inf.fill_(0.0)


def bucket_groups(chunk: Any) -> list[Any]:
    """The units that DDP communicates in, dense and expert."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def discard_activations(model: list[Any]) -> None:
    """Put modules into training mode and drop tensors that a partial pass left in them."""
    for chunk in model:
        chunk.train()
        gpt = unwrap(chunk)
        gpt.decoder.input_tensor = None
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            buffer = getattr(gpt, name, None)
            if buffer is not None:
                buffer.clear()


def discard_expert_counts(config: TransformerConfig, model: list[Any]) -> None:
    """Zero what mixture-of-experts layers sum up over an iteration."""
    if config.num_moe_experts is None:
        return
    reset_model_temporary_tensors(config, model)
    for entry in get_moe_layer_wise_logging_tracker().values():
        entry["values"].zero_()


def discard_random_forks() -> None:
    """The tracker is in no fork between iterations."""
    tracker = get_cuda_rng_tracker()
    if hasattr(tracker, "_current_state_name"):
        tracker._current_state_name = "default-rng"


def reset_rerun_machine(iteration: int) -> None:
    """No run of an iteration is under way; `iteration` iterations are complete."""
    machine = get_rerun_state_machine()
    machine.state = RerunState.NOT_RUNNING_YET
    machine.current_iteration = iteration
    machine.rerun_requested = False
    machine.checkpoint_requested = False
    machine.restart_again_requested = False
    machine.continue_requested = False
    machine.saved_state = None
    machine.failed_validation_call = None
    machine.data_iterator_checkpoints = None
    machine.validation_counts.clear()
    machine.saved_results.clear()


def wait_for_device() -> None:
    """Kernels that the partial iteration queued are done before its memory is used again."""
    torch.cuda.synchronize()
