"""What a guardian moves in an epoch: its slot's snapshots to the holders, a lost slot's to here;
and what it checks before its trainer goes back to a snapshot.

The sums of its own snapshots are kept here, beside the trainer's reach: made while a snapshot is
sent, checked when it is needed. A damaged one is dropped and never offered again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from deadpool import messages as m
from deadpool.arena import Arena, Replica
from deadpool.injection import Copy, InjectionPhase, Injector
from deadpool.integrity import Manifest, sum_chunks
from deadpool.mpi.choice import Way
from deadpool.mpi.transport import MpiTransport
from deadpool.protocol import events as e
from deadpool.protocol.snapshots import NUM_BUFFERS, capture_buffer
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Plan, Slot
from deadpool.replication import (
    Channel,
    ReplicaRefused,
    SnapshotDamaged,
    TcpChannel,
    pull_replica,
    put_replica,
)
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
        self.channels: dict[MemberId, TcpChannel] = {}
        """To the holders."""

    def is_open(self) -> bool:
        return self._is_open

    def hang_up(self) -> None:
        for channel in self.channels.values():
            channel.close()
        self.channels.clear()

    def close(self) -> None:
        self._is_open = False
        for task in self.tasks:
            task.cancel()
        self.hang_up()


class Transfers:
    """Carries out Put and the fetch of AdoptPlan; on the guardian's event loop.

    feed: takes PutDone and FetchFailed. damaged: told of own snapshots that are, once they are
    dropped. start: owns the tasks and reports their errors. mpi: where puts may go by MPI.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        token: bytes,
        injector: Injector,
        feed: Callable[[e.Event], None],
        damaged: Callable[[e.Damaged], None],
        tell_trainer: Callable[[m.Message], None],
        start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        mpi: MpiTransport | None = None,
    ) -> None:
        self._arena = arena
        self.token = token
        self._injector = injector
        self._feed = feed
        self._damaged = damaged
        self._tell_trainer = tell_trainer
        self._start = start
        self._mpi = mpi
        self._plan: Plan | None = None
        self._epoch = Epoch(0)
        self._slot: Slot | None = None
        self._lane = _Lane()
        self._incoming: asyncio.Task[tuple[Replica, float]] | None = None
        self._putting: asyncio.Task[None] | None = None
        self._manifests: dict[Iteration, Manifest] = {}
        """Of own snapshots. Of those that the trainer has written over, too, until others come."""
        self._kept_in: dict[int, Iteration] = {}
        """What each buffer held when `_manifests` last got one of it."""
        self._check: asyncio.Task[str] | None = None
        """Of the snapshot to restore; it outlives its epoch, so that what it finds is known."""

    def cancel(self) -> None:
        """The epoch has ended."""
        self._lane.close()
        self._lane = _Lane()
        if self._mpi is not None:
            self._mpi.close()
        self._putting = self._incoming = None

    def resume(self) -> None:
        """The adopted epoch trains. An MPI world is started only now: it takes a second of CPU."""
        if self._mpi is not None:
            assert self._plan is not None and self._slot is not None
            self._mpi.open(self._plan, self._slot, self.token, self._arena.payload_bytes)

    def _begin(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self._start(coroutine)
        self._lane.tasks = [t for t in self._lane.tasks if not t.done()] + [task]
        return task

    # A replaced slot's snapshot

    def adopt(self, action: e.AdoptPlan) -> None:
        """Forget snapshots past the restored one; fetch it, or check the one that is here, while
        the trainer builds its model or groups."""
        restore = action.plan.restart.restore
        self._plan, self._epoch, self._slot = action.plan, action.plan.epoch, action.slot
        if restore is None:
            return
        self._arena.invalidate_after(restore)
        self._kept_in = {b: i for b, i in self._kept_in.items() if i <= restore}
        self._manifests = {i: self._manifests[i] for i in self._kept_in.values()}
        if action.source is not None:
            self._incoming = self._begin(
                self._fetch(self._lane, self._epoch, action.slot, restore, action.source)
            )
        else:
            self._check = self._start(self._find_flaw(action.slot, restore))

    async def own(self, live: Iteration | None) -> frozenset[Iteration]:
        """What this slot can be restored to from this node's memory, once what is being checked
        has been. live: what its trainer can take a snapshot of, which needs none."""
        if self._check is not None:
            await asyncio.wait([self._check])
            self._check = None
        for buffer in range(NUM_BUFFERS if self._arena.is_attached else 0):
            if not self._arena.has_good_header(buffer):
                held = self._kept_in.get(buffer)
                if held is not None:
                    self._drop(held, buffer, "its header names nothing any more")
        return self._arena.iterations() | ({live} if live is not None else frozenset())

    async def manifest(self, slot: Slot, iteration: Iteration) -> Manifest | None:
        """Of the own snapshot, read once more; None where it is not here, or damaged."""
        flaw = await self._find_flaw(slot, iteration)
        return None if flaw else self._manifests.get(iteration)

    async def _finish_check(self, slot: Slot, iteration: Iteration) -> str:
        """The one begun with the plan; a new one for what the trainer took anew."""
        check = self._check or self._start(self._find_flaw(slot, iteration))
        self._check = check
        await asyncio.wait([check])  # A cancellation of this must not reach it.
        self._check = None
        return check.result()

    async def _find_flaw(self, slot: Slot, iteration: Iteration) -> str:
        """Why the snapshot here, which then is dropped, is not what it was; empty where it is. One
        that was not read before, as its epoch ended first, gets its sums now."""
        buffer = self._arena.find(iteration)
        if buffer is None:
            return "it is not here any more"
        payload, known = self._arena.payload(buffer), self._manifests.get(iteration)
        sums = await sum_chunks(payload)
        if known is None:
            manifest = Manifest.of(
                slot=slot, iteration=iteration, num_bytes=len(payload), sums=sums
            )
            self._keep(buffer, manifest)
            return ""
        flaw = known.flaw(slot, iteration, sums)
        if flaw:
            self._drop(iteration, buffer, flaw)
        return flaw

    def _keep(self, buffer: int, manifest: Manifest) -> None:
        others = {b: i for b, i in self._kept_in.items() if i != manifest.iteration and b != buffer}
        self._kept_in = {**others, buffer: manifest.iteration}
        self._manifests[manifest.iteration] = manifest
        self._manifests = {i: self._manifests[i] for i in self._kept_in.values()}

    def _drop(self, iteration: Iteration, buffer: int, flaw: str) -> None:
        """One that has sums, once."""
        manifest = self._manifests.pop(iteration, None)
        self._kept_in = {b: i for b, i in self._kept_in.items() if i != iteration}
        if manifest is not None:
            self._arena.invalidate(buffer)
            damaged = e.Damaged(slot=manifest.slot, iteration=iteration, reason=flaw)
            self._damaged(damaged)

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
        """The trainer's arena has its size: put the fetched snapshot there where one was, check it
        where it was here, and say so. Damaged ones end the epoch, unless the trainer has better."""
        if wanted.epoch == self._epoch:
            self._begin(self._deliver(self._lane, wanted))

    async def _deliver(self, lane: _Lane, wanted: m.SnapshotWanted) -> None:
        num_bytes, seconds = 0, 0.0
        assert self._slot is not None
        if self._incoming is None:
            flaw = await self._finish_check(self._slot, wanted.iteration)
            if not lane.is_open():
                return
            if flaw and not wanted.is_live:
                reason = f"slot {self._slot} has no good snapshot of {wanted.iteration}: {flaw}"
                self._feed(e.FetchFailed(epoch=wanted.epoch, reason=reason))
                return
            buffer = self._arena.find(wanted.iteration)
        else:
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
            assert replica.manifest is not None
            self._keep(buffer, replica.manifest)
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
        if not lane.is_open():
            return
        buffer = self._arena.find(action.iteration)
        if buffer is None:
            reason = f"the snapshot of {action.iteration} is gone before its commit"
            self._feed(e.FetchFailed(epoch=action.epoch, reason=reason))
            return
        for holder in action.holders:
            if not await self._put_to(holder, lane, action, buffer):
                return
        self._injector.flip(Copy.SNAPSHOT, action.iteration, self._arena.payload(buffer))
        self._feed(e.PutDone(epoch=action.epoch, iteration=action.iteration))

    async def _put_to(self, holder: Member, lane: _Lane, action: e.Put, buffer: int) -> bool:
        """Tried again until the holder has it, or the epoch ends; whether it has."""

        async def halfway() -> None:
            self._injector.fire(action.iteration, InjectionPhase.REPLICATE)

        while lane.is_open():
            way = self._mpi.pick() if self._mpi is not None else Way.TCP
            try:
                channel = await self._channel(lane, way, holder)
                started = time.monotonic()
                num_bytes = await put_replica(
                    channel,
                    slot=action.slot,
                    epoch=action.epoch,
                    iteration=action.iteration,
                    payload=self._arena.payload(buffer),
                    known=self._manifests.get(action.iteration),
                    summed=functools.partial(self._keep, buffer),
                    halfway=halfway,
                )
            except SnapshotDamaged as error:
                lane.hang_up()
                self._drop(action.iteration, buffer, str(error))
                self._feed(e.FetchFailed(epoch=action.epoch, reason=f"a damaged snapshot: {error}"))
                return False
            except (WireError, ReplicaRefused) as error:
                if way is Way.TCP:
                    lane.hang_up()
                elif self._mpi is not None and isinstance(error, WireError) and lane.is_open():
                    self._mpi.give_up(str(error))
                    continue  # At once, by TCP.
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
                if self._mpi is not None:
                    self._mpi.note(way, num_bytes, time.monotonic() - started)
                return True
        lane.hang_up()  # Of a connection that was made while the lane was closed.
        return False

    async def _channel(self, lane: _Lane, way: Way, holder: Member) -> Channel:
        """Raises WireError."""
        if way is Way.MPI:
            assert self._mpi is not None
            return self._mpi.channel_to(holder)
        channel = lane.channels.get(holder.member)
        if channel is None:
            channel = await TcpChannel.connect(holder, token=self.token)
            lane.channels[holder.member] = channel
        return channel
