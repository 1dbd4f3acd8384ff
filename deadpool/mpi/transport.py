"""The MPI transport of one guardian: an epoch's bridge, its world where this guardian holds slot
0, and which puts go that way. Everything runs on the guardian's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from deadpool.interfaces import interface_of
from deadpool.mpi.bridge import Bridge, BridgeState
from deadpool.mpi.choice import Choice, Way
from deadpool.mpi.frames import SIDECAR_SAYS, world_key
from deadpool.mpi.world import Launcher, World
from deadpool.protocol.types import Member, Plan, Slot
from deadpool.replication import Channel
from deadpool.terminal import say

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""From a world's start until every slot's sidecar is there."""

MIN_MEASURED_BYTES = 16 << 20
"""Of snapshots; with `auto`, smaller ones stay with TCP. They move within some 10 ms, for which
sidecars are not worth their start and their polling."""

_SAY_AFTER_S = 1.0
"""A world also goes when its epoch, or the job, ends elsewhere first, which is no news."""

_FIRST = Slot(0)
"""Whose guardian starts the worlds and speaks of them: every epoch has it."""


class MpiTransport:
    """Opened for each epoch that trains; channels are to be had while its world is up.

    measures: `--deadpool-transport auto`. serve: `ReplicaServer.serve_channel`. start: owns the
    tasks and reports their errors.
    """

    def __init__(
        self,
        *,
        launcher: Launcher,
        measures: bool,
        serve: Callable[[Channel], Coroutine[Any, Any, None]],
        start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        self._launcher = launcher
        self._measures = measures
        self._choice = Choice(measures=measures)
        self._serve = serve
        self._start = start
        self._plan: Plan | None = None
        self._slot = _FIRST
        self._bridge: Bridge | None = None
        self._world: World | None = None
        self._library = ""
        self._has_said_so = False
        """That puts of this epoch go by MPI."""
        self._is_hopeless = False
        """A world never came up: with `auto`, none is tried again."""

    def open(self, plan: Plan, slot: Slot, token: bytes, payload_bytes: int) -> None:
        """An epoch trains: nothing of this may delay a recovery. payload_bytes: of a snapshot."""
        self.close()
        if self._measures and payload_bytes < MIN_MEASURED_BYTES:
            return
        self._plan, self._slot, self._has_said_so = plan, slot, False
        key = world_key(token, plan.epoch)
        self._bridge = Bridge(
            key=key,
            slot=slot,
            serve=self._serve,
            start=self._start,
            up=self._is_up,
            ended=self._is_lost,
        )
        self._bridge.open()
        wanted = self._choice.verdict is not Way.TCP and not self._is_hopeless
        if slot == _FIRST and wanted:
            self._world = World(self._launcher, plan.slots, key)
            self._start(self._run_world(self._world, self._bridge))

    def close(self) -> None:
        """The epoch has ended. Does not wait; may be called again."""
        if self._bridge is not None:
            self._bridge.close()
            self._bridge = None
        if self._world is not None:
            self._world.stop()
            self._world = None

    # Puts

    def pick(self) -> Way:
        is_up = self._bridge is not None and self._bridge.state is BridgeState.UP
        return self._choice.pick(mpi_is_up=is_up)

    def channel_to(self, holder: Member) -> Channel:
        """For one put. Raises WireError when there is no world any more."""
        assert self._bridge is not None and self._plan is not None
        slots = enumerate(self._plan.slots)
        slot = next(Slot(s) for s, m in slots if m.member == holder.member)
        return self._bridge.channel_to(slot)

    def give_up(self, reason: str) -> None:
        """A put by MPI failed: what moves in this epoch from now on goes by TCP."""
        if self._bridge is not None:
            self._bridge.give_up(reason)

    def note(self, way: Way, num_bytes: int, seconds: float) -> None:
        """A put is done."""
        is_up = self._bridge is not None and self._bridge.state is BridgeState.UP
        if not is_up:
            return
        is_decided = self._choice.note(way, num_bytes, seconds)
        if self._slot != _FIRST:
            return
        if is_decided:
            self._has_said_so = True
            self._say_choice()
        if way is Way.MPI and self._choice.verdict is Way.MPI and not self._has_said_so:
            self._has_said_so = True
            assert self._plan is not None
            self._say(f"epoch {self._plan.epoch}: replicas go by mpi ({self._mpi_in_words()})")

    def _say_choice(self) -> None:
        chosen = self._choice.verdict
        assert chosen is not None
        assert self._plan is not None
        host = self._plan.slots[self._slot].host
        speed = self._choice.gigabytes_per_s
        self._say(
            f"replicas go by {chosen.value}: tcp moves {speed(Way.TCP):.3g} GB/s over "
            f"{interface_of(host)}, mpi {speed(Way.MPI):.3g} GB/s ({self._mpi_in_words()}), "
            f"{self._choice.num_bytes / 1e6:.3g} MB each"
        )
        if chosen is Way.TCP:
            self.close()

    def _mpi_in_words(self) -> str:
        assert self._plan is not None
        is_local = len({member.host for member in self._plan.slots}) == 1
        return f"{self._library} {'within this machine' if is_local else 'over its own device'}"

    # The world

    def _is_up(self, library: str) -> None:
        self._library = library

    def _is_lost(self, reason: str) -> None:
        assert self._plan is not None
        if self._world is not None:
            self._world.stop()
        words = f"epoch {self._plan.epoch}: the MPI world is gone ({reason}); replicas go by tcp"
        logger.info("slot %d: %s", self._slot, words)
        if self._slot == _FIRST:
            loop = asyncio.get_running_loop()
            loop.call_later(_SAY_AFTER_S, self._say_lost, self._bridge, words)

    def _say_lost(self, bridge: Bridge | None, words: str) -> None:
        if bridge is not None and bridge is self._bridge:
            self._say(words)

    async def _run_world(self, world: World, bridge: Bridge) -> None:
        def stop_late() -> None:
            if bridge.state is BridgeState.WAITING:
                world.stop()

        too_late = asyncio.get_running_loop().call_later(START_TIMEOUT_S, stop_late)
        try:
            said = await world.run()
        except OSError as error:
            said = str(error)
        finally:
            too_late.cancel()
        if said:
            logger.info("the MPI launcher said: %s", said)
        if bridge.state is BridgeState.WAITING:
            self._is_hopeless = self._measures
            bridge.close()
            self._say(f"no MPI world: {_gist(said)}; replicas go by tcp")

    @staticmethod
    def _say(words: str) -> None:
        say(f"[deadpool] {words}")


def _gist(said: str) -> str:
    """The line of a launcher's output that says most: a sidecar's own, else the last."""
    lines = said.splitlines() or ["it was not up in time"]
    ours = [line for line in lines if line.startswith(SIDECAR_SAYS)]
    return (ours or lines)[-1].removeprefix(SIDECAR_SAYS)
