"""Loss and perplexity on a split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.training import log
from megatron.training.output import print_rank_0, print_rank_last
from megatron.training.step import sum_losses
from megatron.training.transient import discard_expert_counts

if TYPE_CHECKING:
    from megatron.training.trainer import Trainer


def evaluate_and_print(trainer: Trainer, prefix: str, iterators: Any, *, verbose: bool) -> None:
    """Evaluate `--eval-iters` batches, print the line on the last rank, write to TensorBoard."""
    losses = evaluate(trainer, iterators, verbose=verbose)
    print_rank_last(log.validation_line(prefix, losses))
    writer, state = trainer.tensorboard, trainer.state
    if writer is None:
        return
    for name, value in losses.items():
        points = {f"{name} validation": value}
        if trainer.args.log_validation_ppl_to_tensorboard:
            points[f"{name} validation ppl"] = log.perplexity(value)
        for tag, point in points.items():
            writer.add_scalar(tag, point, state.iteration)
            writer.add_scalar(f"{tag} vs samples", point, state.consumed_train_samples)


def evaluate(trainer: Trainer, iterators: Any, *, verbose: bool) -> dict[str, float]:
    """Average losses per token; empty on ranks that do not compute them. All ranks call it.

    The batch is always the full `--global-batch-size`, also while the training batch ramps up.
    """
    args, config, model = trainer.args, trainer.config, trainer.model
    batch_size = args.global_batch_size
    num_microbatches = batch_size // (args.micro_batch_size * args.data_parallel_size)
    if verbose:
        print_rank_0(f"Evaluating on {args.eval_iters * batch_size} samples")
    for chunk in model:
        chunk.eval()
    timers, config.timers = config.timers, None
    trainer.forward_step.announcing = False
    totals: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for round_index in range(args.eval_iters):
            if verbose:
                print_rank_0(f"Evaluating iter {round_index + 1}/{args.eval_iters}")
            reports = get_forward_backward_func()(
                forward_step_func=trainer.forward_step,
                data_iterator=iterators,
                model=model,
                num_microbatches=num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=args.seq_length,
                forward_only=True,
            )
            trainer.state.consumed_valid_samples += batch_size
            if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                for name, total in sum_losses(reports).items():
                    totals[name] = totals.get(name, torch.zeros_like(total)) + total
    trainer.forward_step.announcing = True
    config.timers = timers
    for chunk in model:
        chunk.train()
    discard_expert_counts(config, model)
    return {name: (total[0] / total[1]).item() for name, total in totals.items()}
