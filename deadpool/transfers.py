"""What a guardian moves in an epoch: its slot's snapshots to the holder, a lost slot's to here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from deadpool import messages as m
from deadpool.arena import Arena, Replica
from deadpool.injection import InjectionPhase, Injector
from deadpool.protocol import events as e
from deadpool.protocol.snapshots import capture_buffer
from deadpool.protocol.types import Epoch, Iteration, Member, Slot
from deadpool.replication import Channel, ReplicaRefused, pull_replica, put_replica
from deadpool.wire import WireError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_RETRY_S = 0.1


class _Lane:
    """The transfers of one epoch. `asyncio.wait_for` can swallow a cancellation (Python before
    3.12), so a task also asks whether its lane is open before it goes on."""

    def __init__(self) -> None:
        self._is_open = True
        self.tasks: list[asyncio.Task[Any]] = []
        self.channel: Channel | None = None
        """To the holder."""

    def is_open(self) -> bool:
        return self._is_open

    def hang_up(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        self._is_open = False
        for task in self.tasks:
            task.cancel()
        self.hang_up()


class Transfers:
    """Carries out Put and the fetch of AdoptPlan; on the guardian's event loop.

    feed: takes PutDone and FetchFailed. start: owns the tasks and reports their errors.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        token: bytes,
        injector: Injector,
        feed: Callable[[e.Event], None],
        tell_trainer: Callable[[m.Message], None],
        start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._arena = arena
        self.token = token
        self._injector = injector
        self._feed = feed
        self._tell_trainer = tell_trainer
        self._start = start
        self._epoch = Epoch(0)
        self._slot: Slot | None = None
        self._lane = _Lane()
        self._incoming: asyncio.Task[tuple[Replica, float]] | None = None
        self._putting: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """The epoch has ended."""
        self._lane.close()
        self._lane = _Lane()
        self._putting = self._incoming = None

    def _begin(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._start(coroutine)
        self._lane.tasks = [t for t in self._lane.tasks if not t.done()] + [task]
        return task

    # A replaced slot's snapshot

    def adopt(self, action: e.AdoptPlan) -> None:
        """Forget snapshots past the restored one; fetch it while the trainer builds its model."""
        restore = action.plan.restart.restore
        self._epoch, self._slot = action.plan.epoch, action.slot
        if restore is None:
            return
        self._arena.invalidate_after(restore)
        if action.source is not None:
            self._incoming = self._begin(
                self._fetch(self._lane, self._epoch, action.slot, restore, action.source)
            )

    async def _fetch(
        self, lane: _Lane, epoch: Epoch, slot: Slot, iteration: Iteration, source: Member
    ) -> tuple[Replica, float]:
        """Tried again until it comes or the epoch ends: the source's loss ends the epoch."""
        started = time.monotonic()
        while lane.is_open():
            try:
                replica = await pull_replica(
                    source, token=self.token, slot=slot, epoch=epoch, iteration=iteration
                )
                return replica, time.monotonic() - started
            except WireError as error:
                logger.info("epoch %d: %s; trying again", epoch, error)
                await asyncio.sleep(_RETRY_S)
            except ReplicaRefused as error:
                self._feed(e.FetchFailed(epoch=epoch, reason=str(error)))
                await asyncio.Event().wait()  # The leader ends the epoch, which cancels this.
        raise asyncio.CancelledError

    def deliver(self, wanted: m.SnapshotWanted) -> None:
        """The trainer's arena has its size: put the fetched snapshot there and say so."""
        if wanted.epoch == self._epoch:
            self._begin(self._deliver(self._lane, wanted))

    async def _deliver(self, lane: _Lane, wanted: m.SnapshotWanted) -> None:
        buffer, num_bytes, seconds = self._arena.find(wanted.iteration), 0, 0.0
        if buffer is None:
            assert self._incoming is not None and self._slot is not None
            replica, seconds = await self._incoming
            if not lane.is_open():
                return
            num_bytes = replica.num_bytes
            if num_bytes != self._arena.payload_bytes:
                reason = (
                    f"the replica of slot {self._slot} has {num_bytes} bytes, the model built here "
                    f"takes {self._arena.payload_bytes}"
                )
                self._feed(e.FetchFailed(epoch=wanted.epoch, reason=reason))
                return
            buffer = capture_buffer(self._arena.held())
            self._arena.payload(buffer)[:] = replica.view
            replica.close()
            self._arena.label(buffer, self._slot, wanted.iteration)
        self._tell_trainer(
            m.SnapshotHere(
                epoch=wanted.epoch,
                iteration=wanted.iteration,
                buffer=buffer,
                num_bytes=num_bytes,
                seconds=seconds,
            )
        )

    # Own snapshots

    def put(self, action: e.Put) -> None:
        """After earlier ones of the epoch."""
        self._putting = self._begin(self._put(self._lane, action, self._putting))

    async def _put(self, lane: _Lane, action: e.Put, previous: asyncio.Task[None] | None) -> None:
        if previous is not None and not previous.done():
            await asyncio.wait([previous])

        async def halfway() -> None:
            self._injector.fire(action.iteration, InjectionPhase.REPLICATE)

        if not lane.is_open():
            return
        buffer = self._arena.find(action.iteration)
        assert buffer is not None, (
            f"iteration {action.iteration} was written over before its commit"
        )
        while lane.is_open():
            try:
                if lane.channel is None:
                    lane.channel = await Channel.connect(action.holder, token=self.token)
                await put_replica(
                    lane.channel,
                    slot=action.slot,
                    epoch=action.epoch,
                    iteration=action.iteration,
                    payload=self._arena.payload(buffer),
                    halfway=halfway,
                )
            except (WireError, ReplicaRefused) as error:
                lane.hang_up()
                logger.info(
                    "epoch %d slot %d iteration %d: replica not staged (%s); trying again",
                    action.epoch,
                    action.slot,
                    action.iteration,
                    error,
                )
                await asyncio.sleep(_RETRY_S)
                continue
            if lane.is_open():
                self._feed(e.PutDone(epoch=action.epoch, iteration=action.iteration))
                return
        lane.hang_up()  # Of a connection that was made while the lane was closed.
