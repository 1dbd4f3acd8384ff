"""One training step: forward and backward of all microbatches, then the optimizer."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import track_moe_metrics

from megatron.training.batch import get_batch
from megatron.training.hooks import Phase, TrainingHooks
from megatron.training.model import unwrap


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one iteration produced."""

    losses: dict[str, float]
    """Averages over the global batch; empty on ranks that do not compute the loss."""
    auxiliary: dict[str, float]
    """Mixture-of-experts losses, averaged over layers and microbatches."""
    updated: bool
    """False: gradients overflowed in fp16 and the step was skipped."""
    grad_norm: float | None
    num_zeros: int | None


class ForwardStep:
    """megatron-core's forward step function, announcing each microbatch's phases.

    `announcing` is off during evaluation, which has one phase.
    """

    def __init__(self, args: Namespace, hooks: TrainingHooks) -> None:
        self._args = args
        self._hooks = hooks
        self._counts: dict[int, int] = {}
        self.announcing = True

    def begin_iteration(self) -> None:
        """Count microbatches from 0 again."""
        self._counts.clear()

    def __call__(self, data_iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        gpt = unwrap(chunk)
        microbatch = self._counts.get(id(gpt), 0)
        self._counts[id(gpt)] = microbatch + 1
        first, last = gpt.pre_process, gpt.post_process
        if (first or last) and self.announcing:
            self._hooks.on_phase(Phase.DATA, microbatch)
        batch = get_batch(self._args, data_iterator, first=first, last=last)
        phase = Phase.FORWARD if self.announcing else Phase.EVALUATE
        self._hooks.on_phase(phase, microbatch)
        output = chunk(
            batch.tokens,
            batch.position_ids,
            batch.attention_mask,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
        )
        if output.requires_grad and self.announcing:
            output.register_hook(lambda gradient: self._hooks.on_phase(Phase.BACKWARD, microbatch))
        return output, partial(self._loss, batch.loss_mask)

    def _loss(
        self, loss_mask: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """(sum of the token losses, number of tokens, both as one tensor to report)."""
        mask = loss_mask.view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        num_tokens = mask.sum().clone().detach().to(torch.int)
        if self._args.check_for_nan_in_loss_and_grad:
            _refuse_non_finite(loss)
        report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
        return loss, num_tokens, {"lm loss": report}


def _refuse_non_finite(loss: torch.Tensor) -> None:
    """Raises RuntimeError for NaN and infinities, as Megatron-LM with its rerun machine off."""
    machine = get_rerun_state_machine()
    for test, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        machine.validate_result(
            result=loss,
            rejection_func=test,
            message=f"found {name} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )


def average_losses(reports: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Sum (loss, tokens) over microbatches and data-parallel ranks, then divide.

    The data-parallel group of the last pipeline stage calls it together; elsewhere it is empty.
    """
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    return {name: (total[0] / total[1]).item() for name, total in sum_losses(reports).items()}


def sum_losses(reports: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """name -> [loss, tokens] summed over microbatches and data-parallel ranks: [2] fp32."""
    totals = {}
    for name in reports[0]:
        total = torch.vstack([report[name].view(-1) for report in reports]).sum(dim=0)
        torch.distributed.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        totals[name] = total
    return totals


def auxiliary_losses(
    args: Namespace, num_microbatches: int, iteration: int, writer: Any
) -> dict[str, float]:
    """Balance and z losses of the experts of this iteration. All ranks call it together."""
    if args.num_experts is None:
        return {}
    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    by_kind = {
        "aux_loss": "load_balancing_loss",
        "seq_aux_loss": "seq_load_balancing_loss",
        "global_aux_loss": "global_load_balancing_loss",
    }
    names = [name for kind, name in by_kind.items() if _named(kind, kinds)]
    if args.moe_z_loss_coeff is not None:
        names.append("z_loss")
    values: dict[str, torch.Tensor] = {}
    track_moe_metrics(
        loss_scale=1 / num_microbatches,
        iteration=iteration,
        writer=writer,
        total_loss_dict=values,
        per_layer_logging=args.moe_per_layer_logging,
        force_initialize=True,
        track_names=names,
        num_layers=args.num_layers,
        moe_layer_freq=args.moe_layer_freq,
    )
    return {name: value.item() for name, value in values.items()}


def _named(kind: str, kinds: list[str]) -> bool:
    # Megatron-LM asks whether a single name contains the kind: "seq_aux_loss" tracks both.
    return any(kind in given for given in kinds) if len(kinds) == 1 else kind in kinds
