"""The guardian: owns the snapshot memory, watches its trainer, speaks for it.

One per launcher task, without torch. It forks its trainer first, before it has a thread or an
event loop; then it is one asyncio program: a connection to the leader, one to the trainer, a
server for replicas.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from deadpool import messages as m
from deadpool.arena import Arena, Replica, ReplicaShelf
from deadpool.config import DeadpoolConfig, RankEnvironment
from deadpool.injection import InjectionPhase, Injector
from deadpool.process import describe_exit, die_with_parent, exit_code_of, set_process_name
from deadpool.protocol.types import Epoch, Holdings, Iteration, Plan, Slot
from deadpool.replication import Channel, ReplicaRefused, ReplicaServer, pull_replica, put_replica
from deadpool.wire import WireError, read_message, write_message

logger = logging.getLogger(__name__)

EXIT_LEADER_LOST = 70
"""The leader's connection ended without an order to end."""

_LEAVE_TIMEOUT_S = 60.0
"""How long a trainer may take to end after a completed job; after a failed one it is killed."""

_RETRY_S = 0.1

TrainerMain = Callable[[socket.socket, Arena], int]


def run_guardian(
    config: DeadpoolConfig, environment: RankEnvironment, trainer_main: TrainerMain
) -> int:
    """Run one rank of a node to its end; returns the exit code of the job.

    trainer_main: runs in the forked child with its end of the socket pair and the arena, and
    returns the trainer's exit code.
    """
    arena = Arena.create()
    ours, theirs = socket.socketpair()
    guardian_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    trainer_pid = os.fork()
    if trainer_pid == 0:
        die_with_parent(guardian_pid)
        ours.close()
        set_process_name("dp-trainer")
        os._exit(_run_trainer(trainer_main, theirs, arena))
    theirs.close()
    set_process_name("dp-guardian")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guardian = Guardian(config, environment, arena, trainer_pid, ours)
    try:
        return asyncio.run(guardian.run())
    finally:
        guardian.reap_trainer()


def _run_trainer(trainer_main: TrainerMain, link: socket.socket, arena: Arena) -> int:
    code = 1
    try:
        code = trainer_main(link, arena)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # The reader of our output is gone.
    return code


class Guardian:
    """State of one guardian; every method runs on its event loop."""

    def __init__(
        self,
        config: DeadpoolConfig,
        environment: RankEnvironment,
        arena: Arena,
        trainer_pid: int,
        trainer_socket: socket.socket,
    ) -> None:
        self._config = config
        self._environment = environment
        self._arena = arena
        self._trainer_pid = trainer_pid
        self._trainer_socket = trainer_socket
        self._trainer_status: int | None = None
        self._shelf = ReplicaShelf()
        self._injector = Injector(config.inject, environment.node, config.log_dir)
        self._member: int | None = None
        self._epoch = Epoch(0)
        self._plan: Plan | None = None
        self._slot: Slot | None = None
        self._incoming: asyncio.Task[tuple[Replica, float]] | None = None
        self._replication: asyncio.Task[None] | None = None
        self._end: asyncio.Future[m.End] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        self._trainer_reader, self._trainer_writer = await asyncio.open_connection(
            sock=self._trainer_socket
        )
        self._watch_trainer_process()
        server = ReplicaServer(
            shelf=self._shelf,
            token=self._environment.token,
            host=self._environment.host,
            current_epoch=lambda: self._epoch,
        )
        try:
            self._start(server.serve())
            first = await read_message(self._trainer_reader)
            assert isinstance(first, m.TrainerUp), first
            self._leader_reader, self._leader_writer = await asyncio.open_connection(
                *self._environment.leader
            )
        except (WireError, OSError):
            # The trainer ended before it was up, or there is no leader: nothing began.
            await self._stop(m.End(exit_code=EXIT_LEADER_LOST, reason=""))
            return exit_code_of(self._trainer_status or 0) or EXIT_LEADER_LOST
        write_message(
            self._leader_writer,
            m.Hello(
                token=self._environment.token,
                node=self._environment.node,
                local_rank=self._environment.local_rank,
                host=self._environment.host,
                data_port=server.port,
            ),
        )
        self._start(self._serve_leader())
        self._start(self._serve_trainer())
        end = await self._end
        await self._stop(end)
        return end.exit_code

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._check_task)
        self._tasks = [t for t in self._tasks if not t.done()] + [task]
        return task

    def _check_task(self, task: asyncio.Task[Any]) -> None:
        """An error in any task is a bug of ours: say so and end, never go on half alive."""
        if not task.cancelled() and task.exception() is not None:
            logger.error("guardian task failed", exc_info=task.exception())
            self._finish(m.End(exit_code=1, reason="internal error of a guardian"))

    def _finish(self, end: m.End) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(end)

    async def _stop(self, end: m.End) -> None:
        """End the trainer, then everything of this guardian."""
        write_message(self._trainer_writer, end)
        deadline = time.monotonic() + (_LEAVE_TIMEOUT_S if end.exit_code == 0 else 1.0)
        while self._trainer_status is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        if self._trainer_status is None:
            os.kill(self._trainer_pid, signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._trainer_writer.close()

    # The trainer process

    def _watch_trainer_process(self) -> None:
        descriptor = os.pidfd_open(self._trainer_pid)
        loop = asyncio.get_running_loop()

        def on_exit() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self.reap_trainer()
            self._on_trainer_exit()

        loop.add_reader(descriptor, on_exit)

    def reap_trainer(self) -> None:
        if self._trainer_status is None:
            _, self._trainer_status = os.waitpid(self._trainer_pid, 0)

    def _on_trainer_exit(self) -> None:
        assert self._end is not None and self._trainer_status is not None
        if self._end.done() or self._member is None:
            return
        words = f"its trainer ended with {describe_exit(self._trainer_status)}"
        if os.WIFSIGNALED(self._trainer_status):
            self._tell_leader(m.TrainerLost(reason=words))
        else:
            code = exit_code_of(self._trainer_status)
            self._tell_leader(m.Failed(reason=words, exit_code=code or 1))

    # Messages

    def _tell_leader(self, message: m.Message) -> None:
        write_message(self._leader_writer, message)

    def _tell_trainer(self, message: m.Message) -> None:
        write_message(self._trainer_writer, message)

    async def _serve_leader(self) -> None:
        try:
            while True:
                self._on_leader_message(await read_message(self._leader_reader))
        except WireError:
            self._finish(
                m.End(exit_code=EXIT_LEADER_LOST, reason="the connection to the leader ended")
            )

    def _on_leader_message(self, message: m.AnyMessage) -> None:
        match message:
            case m.Welcome():
                self._member = message.member
            case m.Abort():
                self._epoch = message.epoch
                self._cancel_transfers()
                self._tell_trainer(message)
            case m.NewPlan():
                self._adopt(message.plan)
            case m.Resume():
                self._tell_trainer(message)
                self._stage_restored()
            case m.Committed():
                self._tell_trainer(message)
            case m.Drain():
                os.kill(self._trainer_pid, signal.SIGTERM)
            case m.End():
                self._finish(message)
            case _:
                raise AssertionError(f"{type(message).__name__} from the leader")

    async def _serve_trainer(self) -> None:
        try:
            while True:
                self._on_trainer_message(await read_message(self._trainer_reader))
        except WireError:
            return  # The trainer ended; its process watch says how.

    def _on_trainer_message(self, message: m.AnyMessage) -> None:
        match message:
            case m.ArenaLayout():
                self._arena.attach(message.payload_bytes)
            case m.SnapshotWanted():
                self._start(self._deliver_snapshot(message))
            case m.Aborted():
                if message.epoch == self._epoch:
                    holdings = Holdings(
                        own=self._arena.iterations(), replicas=self._shelf.holdings()
                    )
                    self._tell_leader(
                        m.Aborted(
                            epoch=message.epoch,
                            store_port=message.store_port,
                            holdings=holdings,
                        )
                    )
            case m.Captured():
                if message.epoch == self._epoch:
                    self._replicate(message.iteration, message.buffer)
            case m.Ready() | m.RegroupFailed() | m.FirstStep() | m.Finished() | m.Failed():
                self._tell_leader(message)
            case _:
                raise AssertionError(f"{type(message).__name__} from the trainer")

    # Epochs

    def _cancel_transfers(self) -> None:
        for task in (self._replication, self._incoming):
            if task is not None:
                task.cancel()
        self._replication = self._incoming = None

    def _adopt(self, plan: Plan) -> None:
        """A plan of the current epoch: fetch what this slot lacks, forget what is past it."""
        if plan.epoch != self._epoch:
            return
        self._plan = plan
        self._slot = next(
            Slot(slot) for slot, member in enumerate(plan.slots) if member.member == self._member
        )
        if plan.restore is not None:
            self._arena.invalidate_after(plan.restore)
            self._shelf.invalidate_after(plan.restore)
            source = dict(plan.sources).get(self._slot)
            if source is not None:
                self._incoming = self._start(self._pull(plan, self._slot, source))
        self._tell_trainer(m.PlanForSlot(plan=plan, slot=self._slot))

    async def _pull(self, plan: Plan, slot: Slot, source: int) -> tuple[Replica, float]:
        """The snapshot of this slot from its holder's memory, while the trainer builds its
        model. Tried again until it comes or the epoch ends: the holder's loss ends the epoch."""
        assert plan.restore is not None
        start = time.monotonic()
        holder = next(member for member in plan.slots if member.member == source)
        while True:
            try:
                replica = await pull_replica(
                    holder, token=self._environment.token, slot=slot, iteration=plan.restore
                )
                return replica, time.monotonic() - start
            except WireError as error:
                logger.info("epoch %d: %s; trying again", plan.epoch, error)
                await asyncio.sleep(_RETRY_S)
            except ReplicaRefused as error:
                self._tell_leader(m.Failed(reason=str(error), exit_code=4))
                await asyncio.sleep(_LEAVE_TIMEOUT_S)

    async def _deliver_snapshot(self, wanted: m.SnapshotWanted) -> None:
        """Put the pulled snapshot into the arena and tell the trainer."""
        buffer = self._arena.find(wanted.iteration)
        num_bytes, seconds = 0, 0.0
        if buffer is None:
            if self._incoming is None or wanted.epoch != self._epoch:
                return  # A newer epoch began; its plan will be asked for again.
            replica, seconds = await self._incoming
            if wanted.epoch != self._epoch or replica.num_bytes != self._arena.payload_bytes:
                self._refuse_size(wanted, replica)
                return
            buffer = wanted.iteration % 2
            assert self._slot is not None
            self._arena.payload(buffer)[:] = replica.view
            self._arena.label(buffer, self._slot, wanted.iteration)
            num_bytes = replica.num_bytes
        self._tell_trainer(
            m.SnapshotHere(
                epoch=wanted.epoch,
                iteration=wanted.iteration,
                buffer=buffer,
                num_bytes=num_bytes,
                seconds=seconds,
            )
        )

    def _refuse_size(self, wanted: m.SnapshotWanted, replica: Replica) -> None:
        if wanted.epoch != self._epoch:
            return
        self._tell_leader(
            m.Failed(
                reason=f"the replica of slot {self._slot} has {replica.num_bytes} bytes, the model "
                f"built here takes {self._arena.payload_bytes}",
                exit_code=4,
            )
        )

    def _stage_restored(self) -> None:
        """Training resumes: stage the restored iteration anew. A holder that has it says so, a
        new one gets it."""
        if self._plan is None or self._plan.restore is None:
            return
        buffer = self._arena.find(self._plan.restore)
        assert buffer is not None
        self._replicate(self._plan.restore, buffer)

    # Replication

    def _replicate(self, iteration: Iteration, buffer: int) -> None:
        previous = self._replication
        self._replication = self._start(self._put(self._epoch, iteration, buffer, previous))

    async def _put(
        self,
        epoch: Epoch,
        iteration: Iteration,
        buffer: int,
        previous: asyncio.Task[None] | None,
    ) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        assert self._plan is not None and self._slot is not None
        holder = self._plan.slots[self._plan.holders[self._slot]]

        async def halfway() -> None:
            self._injector.fire(iteration, InjectionPhase.REPLICATE)

        channel: Channel | None = None
        while epoch == self._epoch:
            try:
                channel = await Channel.connect(holder)
                await put_replica(
                    channel,
                    token=self._environment.token,
                    slot=self._slot,
                    epoch=epoch,
                    iteration=iteration,
                    payload=self._arena.payload(buffer),
                    halfway=halfway,
                )
                break
            except (WireError, ReplicaRefused) as error:
                logger.info(
                    "epoch %d slot %d iteration %d: replica not staged (%s); trying again",
                    epoch,
                    self._slot,
                    iteration,
                    error,
                )
                await asyncio.sleep(_RETRY_S)
            finally:
                if channel is not None:
                    channel.close()
        if epoch == self._epoch:
            self._tell_leader(m.Staged(epoch=epoch, iteration=iteration))
