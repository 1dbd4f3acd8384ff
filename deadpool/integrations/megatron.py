"""DEADPOOL as the hooks of the training driver: one object, on the trainer's main thread."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state as megatron_parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from deadpool import emergency, parallel_state
from deadpool import messages as m
from deadpool.arena import Arena
from deadpool.config import DeadpoolConfig, RankEnvironment
from deadpool.errors import describe, is_of_communication, kind_of
from deadpool.groups import BuildSuperseded, GroupRegistry
from deadpool.injection import InjectionPhase, Injector, append_json_line
from deadpool.integrations.memory import budget_of
from deadpool.link import EpochEnded, GuardianLink, GuardianTimeout
from deadpool.optimizer import patch_inner_step, patch_step, rebuild_parameters
from deadpool.pace import AGREE_EVERY, Pace, Windows
from deadpool.parameter_hash import ParametersDiffer, hash_parameters, verify_parameters
from deadpool.placement_report import render
from deadpool.progress import Activity, ProgressBoard
from deadpool.protocol.placement import choose_holders
from deadpool.protocol.types import Iteration
from deadpool.snapshot import SnapshotDamaged, Snapshotter
from deadpool.terminal import say, say_error
from megatron.training.hooks import Phase
from megatron.training.rng import collect_rng_state, restore_rng_state
from megatron.training.state import TrainState

EXIT_NO_CONSISTENT_STATE = 4


_ACTIVITIES = {
    Phase.DATA: Activity.DATA,
    Phase.FORWARD: Activity.FORWARD,
    Phase.BACKWARD: Activity.BACKWARD,
    Phase.OPTIMIZER: Activity.OPTIMIZER,
    Phase.EVALUATE: Activity.EVALUATION,
    Phase.SAVE: Activity.SAVING,
}
_AFTER_STEP = frozenset(
    {Activity.BETWEEN, Activity.EVALUATION, Activity.SAVING, Activity.SETUP, Activity.FINISHED}
)
"""Of an iteration that is complete."""


class DeadpoolHooks:
    """Implements `megatron.training.hooks.TrainingHooks`.

    link: connected to the guardian, not started. arena, board: the memory shared with it.
    """

    def __init__(
        self,
        *,
        config: DeadpoolConfig,
        environment: RankEnvironment,
        link: GuardianLink,
        registry: GroupRegistry,
        arena: Arena,
        board: ProgressBoard,
    ) -> None:
        self._config = config
        self._environment = environment
        self._link = link
        self._arena = arena
        self._board = board
        self._has_stepped = False
        self._injector = Injector(config.inject, environment.node, config.log_dir)
        self._is_replacement = False
        self._live: Iteration | None = None
        """The iteration whose state parameters and optimizer hold; None while a step changes
        them, and before a replacement's state has come."""
        self._completed = Iteration(0)
        """Iterations completed by this process, restored or not."""
        self._snapshots: Snapshotter | None = None
        self._resumed_at: float | None = None
        """When training resumed after a recovery, until its first step is done."""
        self._pace = Pace(config.snapshot_interval)
        self._captured = Iteration(0)
        """The newest snapshot, or what was restored."""
        self._stall_s = 0.0
        self._stepped_at: float | None = None
        """When the last step of this epoch began."""
        self._setup_s: float | None = None
        """How long a replacement took to build its model; None once reported."""
        parallel_state.attach(link, registry)

    # TrainingHooks

    def acquire_rank(self, args: Any) -> bool:
        self._link.start()
        if not parallel_state.register_spare():
            self._link.close()
            return False
        slot = parallel_state.get_slot()
        os.environ["RANK"] = str(slot)
        os.environ["WORLD_SIZE"] = str(self._environment.world_size)
        os.environ["LOCAL_RANK"] = str(self._environment.local_rank)
        self._is_replacement = parallel_state.get_plan().restart.restore is not None
        return True

    def create_process_groups(self, args: Any, create: Callable[..., None]) -> None:
        self._setup_started = time.monotonic()
        parallel_state.create_groups(create, self._environment.world_size)
        if not self._is_replacement:
            parallel_state.reconstruct_groups(self._config.build_timeout_s)

    def is_replacement(self) -> bool:
        return self._is_replacement

    def on_ready(self, trainer: Any) -> None:
        if parallel_state.get_slot() == 0 and not self._is_replacement:
            self._print_placement(trainer.args)
        self._snapshots = Snapshotter(
            arena=self._arena,
            slot=parallel_state.get_slot(),
            model=trainer.model,
            optimizer=trainer.optimizer,
            collect_random=collect_rng_state,
            restore_random=restore_rng_state,
            on_captured=self._on_captured,
            on_halfway=lambda iteration: self._injector.fire(iteration, InjectionPhase.CAPTURE),
        )
        self._trainer = trainer
        self._link.send(m.ArenaLayout(payload_bytes=self._snapshots.payload_bytes))
        patch_step(trainer.optimizer, before=self._before_step, after=self._after_optimizer)
        if self._injector.is_due_in(InjectionPhase.OPTIMIZER):
            patch_inner_step(trainer.optimizer, self._inside_step)
        if self._is_replacement:
            self._setup_s = time.monotonic() - self._setup_started
            self._rejoin(trainer)
            trainer.rebuild_data_iterators()
            return
        self._load_emergency(trainer)
        self._live = self._completed = Iteration(trainer.state.iteration)
        self._snapshots.capture_tensors(self._live)
        self._seal(trainer)
        self._send_ready({}, num_bytes=0, iterations_rerun=0)
        self._link.wait_resume()

    def on_phase(self, phase: Phase, microbatch: int | None = None) -> None:
        is_first = not self._has_stepped and phase is not Phase.SAVE
        self._note(Activity.FIRST if is_first else _ACTIVITIES[phase])
        self._link.check_epoch()
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            self._inject(phase, self._trainer.state.iteration + 1, microbatch)

    def _note(self, activity: Activity) -> None:
        is_after = activity in _AFTER_STEP
        self._board.note(activity, self._trainer.state.iteration + (0 if is_after else 1))

    def _inject(self, phase: Phase, iteration: int, microbatch: int | None) -> None:
        if phase is Phase.FORWARD and microbatch == get_num_microbatches() - 1:
            self._injector.fire(iteration, InjectionPhase.FORWARD)
        elif phase is Phase.BACKWARD:
            self._injector.fire(iteration, InjectionPhase.BACKWARD)

    def after_step(self, trainer: Any, losses: dict[str, float]) -> None:
        iteration = Iteration(trainer.state.iteration)
        self._live = self._completed = iteration
        self._has_stepped = True
        self._note(Activity.BETWEEN)
        if self._pace.is_due(iteration):
            self._seal(trainer)
        if losses and self._logs_losses():
            self._write(
                "losses.jsonl",
                {
                    "iteration": iteration,
                    "epoch": self._link.epoch,
                    "losses": losses,
                    "hex": {name: value.hex() for name, value in losses.items()},
                    "stall_s": self._stall_s,
                },
            )
        if self._resumed_at is not None:
            seconds = time.monotonic() - self._resumed_at
            self._resumed_at = None
            self._link.send(
                m.FirstStep(epoch=self._link.epoch, iteration=iteration, seconds=seconds)
            )

    def on_error(self, trainer: Any, error: BaseException) -> bool:
        """Mended by a new epoch: one that a lost node brings, or one that is asked for here. The
        job fails where the same error comes again."""
        grace_s = self._config.error_grace_s if is_of_communication(error) else 0.0
        if self._link.wait_abort(grace_s) is None:
            self._ask_for_epoch(trainer.state.iteration + 1, error)
        self._acknowledge()
        self._rejoin(trainer)
        return True

    def _ask_for_epoch(self, iteration: int, error: BaseException) -> None:
        say_error(error)
        say(
            f"[deadpool] node {self._environment.node}: iteration {iteration} failed with "
            f"{describe(error)}; all ranks go back to the last snapshot",
        )
        self._link.send(
            m.Faltered(
                epoch=self._link.epoch,
                iteration=Iteration(iteration),
                kind=kind_of(error),
                reason=describe(error),
            )
        )

    def on_finished(self, trainer: Any) -> None:
        self._note(Activity.FINISHED)
        self._link.send(m.Finished(epoch=self._link.epoch))
        self._link.wait_end()
        self._write(
            "final.jsonl",
            {
                "slot": parallel_state.get_slot(),
                "iteration": trainer.state.iteration,
                "parameters_xxh3": f"{hash_parameters(trainer.model):016x}",
            },
        )
        assert self._snapshots is not None
        self._snapshots.close()
        self._link.close()
        parallel_state.destroy_groups()

    def metrics(self) -> dict[str, float]:
        return self._pace.metrics()

    # Snapshots

    def _before_step(self) -> None:
        """The step overwrites what the last capture copied; and if its result is captured, the
        snapshot before must be complete everywhere: then the buffer that the capture takes is not
        needed any more, and at most one iteration, with an interval `most_iterations_rerun`, is
        ever run again."""
        assert self._snapshots is not None
        iteration = Iteration(self._completed + 1)
        if self._pace.is_auto and iteration % AGREE_EVERY == 0:
            self._agree_on_interval()
        started = time.monotonic()
        self._snapshots.wait_copied()
        if self._pace.is_due(iteration):
            self._wait_committed()
        now = time.monotonic()
        self._stall_s = now - started
        if self._stepped_at is not None:
            self._pace.note_iteration(now - self._stepped_at - self._stall_s)
        self._stepped_at = now
        self._note_commits()
        self._live = None

    def _wait_committed(self) -> None:
        try:
            self._link.wait_committed(self._captured, self._config.commit_timeout_s)
        except GuardianTimeout:
            raise RuntimeError(
                f"the snapshot of iteration {self._captured} was not committed within "
                f"--deadpool-commit-timeout {self._config.commit_timeout_s:g} s"
            ) from None

    def _note_commits(self) -> None:
        assert self._snapshots is not None
        for commit in self._link.take_commits():
            capture_s = self._snapshots.capture_seconds(commit.iteration)
            if commit.replicate_s == 0 or capture_s == 0:
                continue  # A restored one.
            windows = Windows(
                iteration=commit.iteration,
                capture_s=capture_s,
                replicate_s=commit.replicate_s,
                commit_s=commit.commit_s,
                stall_s=self._stall_s,
            )
            self._pace.note(windows)
            if self._logs_losses():
                record = {"slot": parallel_state.get_slot(), "epoch": commit.epoch}
                self._write("snapshots.jsonl", {**record, **dataclasses.asdict(windows)})

    def _agree_on_interval(self) -> None:
        """The longest that any slot needs. A collective: an interval is of all slots."""
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        wanted = torch.tensor([self._pace.wanted()], dtype=torch.int64, device=device)
        torch.distributed.all_reduce(wanted, op=torch.distributed.ReduceOp.MAX)
        words = self._pace.adopt(int(wanted.item()))
        if words and parallel_state.get_slot() == 0:
            say(f"[deadpool] iteration {self._completed}: {words}")

    def _inside_step(self) -> None:
        self._injector.fire(self._trainer.state.iteration + 1, InjectionPhase.OPTIMIZER)

    def _after_optimizer(self) -> None:
        assert self._snapshots is not None
        iteration = Iteration(self._trainer.state.iteration + 1)
        if self._pace.is_due(iteration):
            self._snapshots.capture_tensors(iteration)

    def _seal(self, trainer: Any) -> None:
        assert self._snapshots is not None and self._live is not None
        metadata = {
            "state": trainer.state.to_dict(),
            "scheduler": trainer.scheduler.state_dict(),
            "snapshot_interval": self._pace.interval,
        }
        self._snapshots.seal(self._live, metadata)
        self._captured = self._live

    def _on_captured(self, iteration: Iteration, buffer: int) -> None:
        self._link.send(m.Captured(epoch=self._link.epoch, iteration=iteration, buffer=buffer))

    # Recovery

    def _acknowledge(self) -> None:
        """Wait for an epoch newer than the current one and enter it."""
        abort = self._link.wait_abort(None)
        assert abort is not None
        if self._snapshots is not None:
            self._snapshots.settle()
        parallel_state.acknowledge(abort, self._live_snapshot())
        self._note(Activity.SETUP)

    def _rejoin(self, trainer: Any) -> None:
        """Go through epochs until one trains. The leader bounds every one of them."""
        while True:
            try:
                self._link.check_epoch()
                self._enter_epoch(trainer)
                return
            except (EpochEnded, BuildSuperseded):
                pass
            except (ParametersDiffer, SnapshotDamaged) as error:
                self._fail(str(error), EXIT_NO_CONSISTENT_STATE)
                raise
            except Exception as error:
                # A peer was lost while the groups were built or used; if nobody was, try again,
                # as often as the leader allows.
                if self._link.wait_abort(self._config.error_grace_s) is None:
                    reason = f"{type(error).__name__}: {error}"
                    self._link.send(m.RegroupFailed(epoch=self._link.epoch, reason=reason))
            self._acknowledge()

    def _enter_epoch(self, trainer: Any) -> None:
        plan = parallel_state.adopt_plan()
        restore = plan.restart.restore
        assert restore is not None and self._snapshots is not None
        started = time.monotonic()
        parallel_state.reconstruct_groups(self._config.build_timeout_s)
        regrouped = time.monotonic()
        trainer.discard_partial_iteration()
        here, buffer = self._load(restore)
        metadata = self._load_rest(trainer, buffer)
        restored = time.monotonic()
        verify_parameters(trainer.model)
        verified = time.monotonic()
        rerun = max(0, self._completed - restore)
        self._live = self._completed = self._captured = restore
        self._pace.restore(metadata["snapshot_interval"])
        self._stepped_at = None
        seconds = {
            "regroup": regrouped - started,
            "restore": restored - regrouped,
            "verify": verified - restored,
            "transfer": here.seconds,
        }
        if self._setup_s is not None:
            seconds["setup"], self._setup_s = self._setup_s, None
        self._send_ready(seconds, num_bytes=here.num_bytes, iterations_rerun=rerun)
        self._link.wait_resume()
        self._resumed_at = time.monotonic()

    def _load_rest(self, trainer: Any, buffer: int) -> dict[str, Any]:
        """All but the tensors, which are in place; parameters are rebuilt of those."""
        assert self._snapshots is not None
        metadata = self._snapshots.load_rest(buffer)
        trainer.state = TrainState.from_dict(metadata["state"])
        trainer.scheduler.num_steps = 0  # load_state_dict adds to it (megatron-core 0.16.1).
        trainer.scheduler.load_state_dict(metadata["scheduler"])
        rebuild_parameters(trainer.model, trainer.optimizer)
        return metadata

    def _load_emergency(self, trainer: Any) -> None:
        """Where an earlier job kept a newer iteration than the checkpoint has, go on from that. A
        collective of all slots. Ends the job where it cannot be read."""
        directory, slot = self._config.load, parallel_state.get_slot()
        if directory is None:
            return
        found = emergency.newest(directory, self._environment.world_size)
        device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
        agreed = torch.tensor([-1 if found is None else found], device=device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MIN)
        iteration = Iteration(int(agreed.item()))
        if iteration <= trainer.state.iteration:
            return
        assert self._snapshots is not None
        try:
            emergency.read(directory, iteration, slot, self._arena.payload(0))
            self._snapshots.load_tensors(0)
            self._load_rest(trainer, 0)
        except (OSError, emergency.Unreadable, SnapshotDamaged) as error:
            folder = emergency.folder_of(directory, iteration)
            self._fail(
                f"{error}; remove {folder} to go on from the checkpoint", EXIT_NO_CONSISTENT_STATE
            )
            raise
        trainer.state.start_iteration = iteration
        trainer.rebuild_data_iterators()
        if slot == 0:
            say(f"[deadpool] going on from iteration {iteration}, which an earlier job kept")

    def _live_snapshot(self) -> Iteration | None:
        """What a snapshot can be taken of, were all copies in memory damaged."""
        if self._snapshots is None or self._live != self._snapshots.sealed:
            return None
        return self._live

    def _load(self, iteration: Iteration) -> tuple[m.SnapshotHere, int]:
        """Main parameters and moments of `iteration` into place, unless they are there already;
        what the guardian said, and the buffer with the rest of the state."""
        assert self._snapshots is not None
        is_live = self._live_snapshot() == iteration
        here = self._ask_for_snapshot(iteration, is_live=is_live)
        if here.buffer is None:
            assert is_live
            self._snapshots.retake()
            here = self._ask_for_snapshot(iteration, is_live=False)
            assert here.buffer is not None
        if self._live != iteration:
            self._live = None
            self._snapshots.load_tensors(here.buffer)
        return here, here.buffer

    def _ask_for_snapshot(self, iteration: Iteration, *, is_live: bool) -> m.SnapshotHere:
        epoch = self._link.epoch
        self._link.send(m.SnapshotWanted(epoch=epoch, iteration=iteration, is_live=is_live))
        return self._link.wait_snapshot(iteration)

    def _send_ready(
        self, seconds: dict[str, float], *, num_bytes: int, iterations_rerun: int
    ) -> None:
        self._link.send(
            m.Ready(
                epoch=self._link.epoch,
                seconds=seconds,
                num_bytes=num_bytes,
                iterations_rerun=iterations_rerun,
            )
        )

    def _fail(self, reason: str, exit_code: int) -> None:
        sys.stdout.flush()
        self._link.send(m.Failed(reason=reason, exit_code=exit_code))

    # Records

    def _print_placement(self, args: Any) -> None:
        budget = budget_of(args, self._environment.ranks_per_node)
        members = parallel_state.get_plan().slots[:: self._environment.ranks_per_node]
        text = render(
            budget.grid,
            budget.needs,
            budget.sizes,
            choose_holders(budget.grid, self._config.replicas),
            nodes=[member.node for member in members],
            num_spare_nodes=self._environment.num_spare_nodes,
        )
        say(text)

    def _logs_losses(self) -> bool:
        state = megatron_parallel_state
        return (
            state.get_data_parallel_rank(with_context_parallel=True) == 0
            and state.get_tensor_model_parallel_rank() == 0
        )

    def _write(self, name: str, record: dict[str, Any]) -> None:
        if self._config.log_dir is not None:
            append_json_line(os.path.join(self._config.log_dir, name), record)
