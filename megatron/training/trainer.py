"""The training loop of one rank, and the one place where a failure of it is mended."""

from __future__ import annotations

import dataclasses
import gc
import time
from argparse import Namespace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig

from megatron.training import log, transient
from megatron.training.checkpointing import save_checkpoint
from megatron.training.data import DataSets, chunk_reads_data, open_stream
from megatron.training.evaluation import evaluate_and_print
from megatron.training.flops import floating_point_operations
from megatron.training.hooks import Phase, TrainingHooks
from megatron.training.norms import parameter_hashes_agree, parameter_norm
from megatron.training.output import print_datetime, print_rank_0, print_rank_last
from megatron.training.parameter_sync import ParameterSync
from megatron.training.signals import ExitSignal, any_rank
from megatron.training.state import TrainState
from megatron.training.step import ForwardStep, StepResult, auxiliary_losses, average_losses


@dataclasses.dataclass(slots=True)
class IntervalClock:
    """Seconds spent training since the last log line; evaluation and saving do not count."""

    seconds: float = 0.0
    iterations: int = 0
    _started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    def per_iteration(self) -> float:
        return self.seconds / max(1, self.iterations)

    def reset(self) -> None:
        self.seconds, self.iterations = 0.0, 0


class Trainer:
    """One rank's model, optimizer, data and counters, and the loop over them.

    What a fault-tolerance system may rely on:

    - Between iterations everything that training depends on is in the parameters and buffers of
      `model`, in `optimizer`, `scheduler`, `state` and the generators of `rng.collect_rng_state`.
    - Data is a pure function of `state`'s counts of consumed samples.
    - After an exception anywhere in the loop, `discard_partial_iteration` forgets the rest.
    """

    def __init__(
        self,
        *,
        args: Namespace,
        config: TransformerConfig,
        hooks: TrainingHooks,
        model: list[Any],
        optimizer: MegatronOptimizer | None,
        scheduler: OptimizerParamScheduler | None,
        datasets: DataSets,
    ) -> None:
        self.args = args
        self.config = config
        self.hooks = hooks
        self.model = model
        """DistributedDataParallel chunks; bare ones with `--skip-train`."""
        self.optimizer: Any = optimizer
        """None with `--skip-train`, and so is the scheduler."""
        self.scheduler: Any = scheduler
        self.state = TrainState()
        self.datasets = datasets
        self.forward_step = ForwardStep(args, hooks)
        self.tensorboard: Any = None
        self._parameter_sync = ParameterSync(args, config, model)
        self._exit_signal: ExitSignal | None = None
        self._clock = IntervalClock()
        self._printed_iteration = 0
        self._started = time.monotonic()
        self.rebuild_data_iterators()

    def rebuild_data_iterators(self) -> None:
        """Open all data streams anew at the samples that `state` says come next."""
        self.train_iterators = self._open(self.datasets.train, self.state.consumed_train_samples)
        self.valid_iterators = self._open(self.datasets.valid, self.state.consumed_valid_samples)
        self.test_iterators = self._open(self.datasets.test, 0)

    def _open(self, dataset: Any, consumed_samples: int) -> Any:
        """An iterator, or one per chunk: with several chunks each reads the same batches."""
        streams = [
            open_stream(self.args, dataset if chunk_reads_data(chunk) else None, consumed_samples)
            for chunk in self.model
        ]
        return streams[0] if len(streams) == 1 else streams

    def discard_partial_iteration(self) -> None:
        """Bring every transient thing of megatron-core back to 'between iterations'.

        Local: no collective, callable with broken process groups once nothing uses them any more.
        Parameters, optimizer, scheduler, `state` and generators are left as they are. Idempotent.
        """
        transient.wait_for_device()
        self._parameter_sync.begin()
        transient.discard_gradients(self.model, self.optimizer)
        transient.discard_activations(self.model)
        transient.discard_expert_counts(self.config, self.model)
        transient.discard_random_forks()
        transient.reset_rerun_machine(self.state.iteration)
        self._configure()
        self.forward_step.begin_iteration()
        self.forward_step.announcing = True
        self._clock.start()

    def gather_parameters(self) -> None:
        """Complete the parameters of every rank from the shards that own them.

        With `--overlap-param-gather` they are incomplete from `optimizer.step()` until the next
        forward pass. All ranks call it together; otherwise it does nothing.
        """
        self._parameter_sync.complete()

    def _configure(self) -> None:
        """Point megatron-core's configuration at this trainer's functions and fresh timers."""
        config, optimizer = self.config, self.optimizer
        timers = Timers(self.args.timing_log_level, self.args.timing_log_option)
        config.timers = timers
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            one.config.timers = timers
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        self._parameter_sync.configure()

    def run(self) -> None:
        """Train, evaluate and save until the flags say so. All ranks call it together.

        Every failure after set-up comes to the one `except` here. What `hooks` mends goes on from
        the restored iteration: its evaluation and saving are done again, its training is not.
        """
        if not self.args.skip_train:
            self._begin()
        again = self.hooks.is_replacement()
        if again:
            # The rank that this one replaces has printed the line of the restored iteration.
            self._printed_iteration = self.state.iteration
        while True:
            try:
                left_early = self._train(again)
                if not left_early:
                    self._complete_job()
                self.hooks.on_finished(self)
                return
            except Exception as error:
                transient.release_frames(error)
                if self.args.skip_train or not self.hooks.on_error(self, error):
                    raise
            self.discard_partial_iteration()
            self.rebuild_data_iterators()
            self._printed_iteration = min(self._printed_iteration, self.state.iteration)
            again = True

    def _begin(self) -> None:
        args = self.args
        for chunk in self.model:
            chunk.train()
        self._parameter_sync.begin()
        self._configure()
        transient.reset_rerun_machine(self.state.iteration)
        if args.exit_signal_handler:
            self._exit_signal = ExitSignal(args.exit_signal)
        self.tensorboard = log.open_tensorboard(args)
        log.write_arguments(self.tensorboard, args, self.state.iteration)
        if args.manual_gc:
            gc.disable()
            gc.collect()
        self._check_weight_hashes(self.state.iteration)
        print_datetime("before the start of training step")
        self._clock.start()

    def _train(self, again: bool) -> bool:
        """Iterate to the end. True: the flags asked to leave before it."""
        if self.args.skip_train:
            print_rank_0("skipping training (--skip-train is on) ...")
            return False
        restored = again and self.state.iteration > self.state.start_iteration
        if restored and self._after_iteration(again=True):
            return True
        while self.state.iteration < self.args.train_iters:
            if self._prepare_iteration():
                self._iterate()
                if self._after_iteration(again=False):
                    return True
        return False

    def _prepare_iteration(self) -> bool:
        """Set the batch size. False: `--iterations-to-skip` names the iteration, it was skipped."""
        args, state = self.args, self.state
        consumed = state.consumed_train_samples
        update_num_microbatches(consumed, consistency_check=False, verbose=True)
        grown = get_num_microbatches() > state.num_microbatches > 0
        if grown and args.save is not None:
            self._save()
        update_num_microbatches(consumed, consistency_check=True, verbose=True)
        if state.iteration not in (args.iterations_to_skip or []):
            return True
        batch_size = self._batch_size()
        state.iteration += 1
        state.consumed_train_samples += batch_size
        state.skipped_train_samples += batch_size
        self.rebuild_data_iterators()
        return False

    def _batch_size(self) -> int:
        return get_num_microbatches() * self.args.micro_batch_size * self.args.data_parallel_size

    def _iterate(self) -> None:
        """One iteration up to and including `hooks.after_step`.

        After `optimizer.step()` there is no collective until the hooks know of the step, but for
        the parameter norm.
        """
        result = self._step()
        if result.updated:
            self.scheduler.step(increment=self._batch_size())
            self._parameter_sync.overlap()
        self._count(result)
        self.hooks.after_step(self, result.losses)
        self._write_tensorboard(result)

    def _step(self) -> StepResult:
        args = self.args
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.forward_step.begin_iteration()
        num_microbatches = get_num_microbatches()
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.train_iterators,
            model=self.model,
            num_microbatches=num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
            forward_only=False,
        )
        losses = average_losses(reports)
        auxiliary = auxiliary_losses(
            args, num_microbatches, self.state.iteration + 1, self.tensorboard
        )
        if args.empty_unused_memory_level >= 1:
            torch.cuda.empty_cache()
        self.hooks.on_phase(Phase.OPTIMIZER)
        updated, grad_norm, num_zeros = self.optimizer.step()
        if args.empty_unused_memory_level >= 2:
            torch.cuda.empty_cache()
        return StepResult(
            losses=losses,
            auxiliary=auxiliary,
            updated=bool(updated),
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_zeros=None if num_zeros is None else int(num_zeros),
        )

    def _count(self, result: StepResult) -> None:
        args, batch_size = self.args, self._batch_size()
        metrics = {
            "learning-rate": _in_fp32(get_canonical_lr_for_logging(self.optimizer.param_groups)),
            "batch-size": batch_size,
            "loss-scale": self.optimizer.get_loss_scale().item(),
        }
        if result.grad_norm is not None:
            metrics["grad-norm"] = _in_fp32(result.grad_norm)
        if result.num_zeros is not None and args.log_num_zeros_in_grad:
            metrics["num-zeros"] = result.num_zeros
        if args.log_params_norm:
            metrics["params-norm"] = parameter_norm(args, self.model)
        self.state.complete_iteration(
            losses=result.losses,
            auxiliary=result.auxiliary,
            updated=result.updated,
            metrics=metrics,
            batch_size=batch_size,
            num_microbatches=get_num_microbatches(),
            operations=floating_point_operations(args, batch_size),
        )
        self._clock.iterations += 1

    def _after_iteration(self, *, again: bool) -> bool:
        """Log, evaluate, check and save. True: leave now.

        `again`: the iteration was restored from a snapshot; what is due is done once more, except
        for lines this process printed already.
        """
        iteration = self.state.iteration
        self._clock.stop()
        self._log(again=again)
        if self._due(self.args.eval_interval) and self.datasets.has_valid:
            self._evaluate()
        if self._due(self.args.train_sync_interval):
            torch.cuda.synchronize()
        if self._due(self.args.check_weight_hash_across_dp_replicas_interval):
            with self._parameter_sync.paused():
                self._check_weight_hashes(iteration)
        if self.args.manual_gc and self._due(self.args.manual_gc_interval):
            gc.collect()
        leave = self._save_or_leave()
        self._clock.start()
        return leave

    def _due(self, interval: int | None) -> bool:
        return interval is not None and interval > 0 and self.state.iteration % interval == 0

    def _log(self, *, again: bool) -> None:
        """Print the line if it is due. Needs no collective, so that it can be done at any time."""
        state, iteration = self.state, self.state.iteration
        first = iteration == state.start_iteration + 1
        due = self._due(self.args.log_interval)
        if (due or first) and iteration > self._printed_iteration:
            self._printed_iteration = iteration
            more = self.hooks.metrics()
            print_rank_last(log.log_line(self.args, state, self._clock.per_iteration(), more))
            if self.tensorboard is not None:
                for name, value in more.items():
                    self.tensorboard.add_scalar(name, value, iteration)
            if self.tensorboard is not None and self.args.log_timers_to_tensorboard:
                self.tensorboard.add_scalar(
                    "iteration-time", self._clock.per_iteration(), iteration
                )
        if due and not again and self.args.timing_log_level > 0:
            self._log_timers()
        # Megatron-LM keeps the sums over the line it prints for a job's first iteration.
        if due and not first:
            state.reset_interval()
            self._clock.reset()

    def _log_timers(self) -> None:
        timers = self.config.timers
        names = list(timers._timers)
        timers.log(names, normalizer=self.args.log_interval)

    def _write_tensorboard(self, result: StepResult) -> None:
        log.write_iteration(self.args, self.tensorboard, self.state, result.losses)

    def _evaluate(self) -> None:
        if self.args.manual_gc and self.args.manual_gc_eval:
            gc.collect()
        self.hooks.on_phase(Phase.EVALUATE)
        with self._parameter_sync.paused():
            evaluate_and_print(
                self, f"iteration {self.state.iteration}", self.valid_iterators, verbose=False
            )
        if self.args.manual_gc and self.args.manual_gc_eval:
            gc.collect(generation=0)

    def _check_weight_hashes(self, iteration: int) -> None:
        if self.args.check_weight_hash_across_dp_replicas_interval is None:
            return
        if not parameter_hashes_agree(self.model):
            raise RuntimeError(f"parameters differ between data-parallel ranks at {iteration}")
        torch.distributed.barrier()
        print_rank_0(f">>> Weight hashes match after {iteration} iterations...")

    def _save(self) -> None:
        self.hooks.on_phase(Phase.SAVE)
        self._parameter_sync.complete()
        save_checkpoint(self)

    def _save_or_leave(self) -> bool:
        """Save if due; decide, on all ranks together, whether to leave."""
        args, iteration = self.args, self.state.iteration
        if self._exit_signal is not None and self._exit_signal.received_anywhere():
            if args.save:
                self._save()
            print_datetime("exiting program after receiving SIGTERM.")
            return True
        saved = bool(args.save) and self._due(args.save_interval)
        if saved:
            self._save()
        reason = None
        minutes = (time.monotonic() - self._started) / 60
        if args.exit_duration_in_mins and any_rank(minutes > args.exit_duration_in_mins):
            reason = f"exiting program after {minutes} minutes"
        elif self._due(args.exit_interval):
            reason = f"exiting program at iteration {iteration}"
        if reason is None:
            return False
        if args.save and not saved:
            self._save()
        print_datetime(reason)
        return True

    def _complete_job(self) -> None:
        """What comes after the last iteration: a last checkpoint, validation and test."""
        args, state = self.args, self.state
        self._parameter_sync.complete()
        if not args.skip_train:
            print_datetime("after training is done")
            if self.tensorboard is not None:
                self.tensorboard.flush()
            if args.save and state.iteration != 0 and not self._due(args.save_interval):
                self._save()
        for has_split, name, iterators in (
            (self.datasets.has_valid, "validation", self.valid_iterators),
            (self.datasets.has_test, "test", self.test_iterators),
        ):
            if has_split:
                self.hooks.on_phase(Phase.EVALUATE)
                prefix = f"iteration {state.iteration} on {name} set"
                with self._parameter_sync.paused():
                    evaluate_and_print(self, prefix, iterators, verbose=True)


def _in_fp32(value: float | None) -> float:
    """Rounded as Megatron-LM's reduction over ranks rounds what it prints."""
    return torch.tensor(value or 0.0, dtype=torch.float32).item()
