"""The trainer's end of the connection to its guardian."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from deadpool import messages as m
from deadpool.protocol.types import Epoch, Iteration
from deadpool.wire import BlockingLink, WireError

EXIT_GUARDIAN_LOST = 71
"""The guardian is gone: the node is dying, or was fenced."""

_T = TypeVar("_T")


class EpochEnded(Exception):
    """A newer epoch was announced; whatever was under way has no meaning any more."""

    def __init__(self, epoch: Epoch) -> None:
        super().__init__(f"epoch {epoch} was announced")
        self.epoch = epoch


class JobEnded(Exception):
    """The job is over while this process waited."""


class GuardianTimeout(Exception):
    """What was waited for did not come within its bound."""


class GuardianLink:
    """Messages from the guardian, kept as facts to be waited for.

    A watcher thread reads; `start` begins it, `close` joins it. on_abort: called by the watcher
    for every announced epoch, before anybody waiting hears of it. Methods that wait belong to the
    main thread and raise EpochEnded when an epoch newer than `self.epoch` is announced.
    """

    def __init__(self, sock: socket.socket, on_abort: Callable[[Epoch], None]) -> None:
        self._link = BlockingLink(sock)
        self._on_abort = on_abort
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._watch, name="deadpool-link", daemon=True)
        self.epoch = Epoch(0)
        """The epoch that the main thread works in."""
        self._abort: m.EnterEpoch | None = None
        self._plan: m.PlanForSlot | None = None
        self._resumed = Epoch(0)
        self._committed: tuple[Epoch, Iteration] = (Epoch(0), Iteration(-1))
        self._commits: list[m.SnapshotCommitted] = []
        """Not taken yet."""
        self._snapshot: m.SnapshotHere | None = None
        self._end: m.TrainerEnd | None = None
        self._closing = False

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._link.close()
        self._thread.join(10.0)

    def send(self, message: m.Message) -> None:
        try:
            self._link.send(message)
        except WireError:
            os._exit(EXIT_GUARDIAN_LOST)

    def _watch(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except WireError:
                if self._closing:
                    return
                os._exit(EXIT_GUARDIAN_LOST)
            if isinstance(message, m.EnterEpoch):
                self._on_abort(message.epoch)
            if isinstance(message, m.TrainerEnd) and message.exit_code != 0:
                # The job has failed elsewhere; the main thread may be deep in compute.
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(message.exit_code)
            with self._changed:
                self._note(message)
                self._changed.notify_all()

    def _note(self, message: m.Message) -> None:
        match message:
            case m.EnterEpoch():
                self._abort = message
            case m.PlanForSlot():
                self._plan = message
            case m.Resume():
                self._resumed = message.epoch
            case m.SnapshotCommitted():
                self._committed = (message.epoch, message.iteration)
                self._commits.append(message)
            case m.SnapshotHere():
                self._snapshot = message
            case m.TrainerEnd():
                self._end = message
            case _:
                raise AssertionError(f"{type(message).__name__} from the guardian")

    # Waiting

    def _wait(self, look: Callable[[], _T | None], timeout_s: float | None) -> _T:
        """Until `look` (called with the lock held) yields something."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = look()
                if found is not None:
                    return found
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise GuardianTimeout
                self._changed.wait(remaining)

    def check_epoch(self) -> None:
        """Raise EpochEnded when a newer epoch was announced. Cheap: once per microbatch."""
        if self._abort is not None and self._abort.epoch > self.epoch:
            raise EpochEnded(self._abort.epoch)

    def wait_abort(self, timeout_s: float | None) -> m.EnterEpoch | None:
        """The newest epoch after the current one; None when none is announced in time. Raises
        JobEnded when the job ends first."""

        def look() -> m.EnterEpoch | None:
            if self._abort is not None and self._abort.epoch > self.epoch:
                return self._abort
            if self._end is not None:
                raise JobEnded
            return None

        try:
            return self._wait(look, timeout_s)
        except GuardianTimeout:
            return None

    def wait_plan(self) -> m.PlanForSlot:
        """The plan of the current epoch. The leader bounds this wait."""

        def look() -> m.PlanForSlot | None:
            self.check_epoch()
            plan = self._plan
            return plan if plan is not None and plan.plan.epoch == self.epoch else None

        return self._wait(look, None)

    def wait_resume(self) -> None:
        """Until everybody is ready in the current epoch. The leader bounds this wait."""

        def look() -> bool | None:
            self.check_epoch()
            return True if self._resumed == self.epoch else None

        self._wait(look, None)

    def wait_committed(self, iteration: Iteration, timeout_s: float) -> None:
        """Until `iteration` is committed in the current epoch. Raises GuardianTimeout."""

        def look() -> bool | None:
            self.check_epoch()
            epoch, committed = self._committed
            return True if epoch == self.epoch and committed >= iteration else None

        self._wait(look, timeout_s)

    def take_commits(self) -> list[m.SnapshotCommitted]:
        """Those that came since the last call."""
        with self._changed:
            taken, self._commits = self._commits, []
        return taken

    def wait_snapshot(self, iteration: Iteration) -> m.SnapshotHere:
        """Until the guardian has brought or checked the snapshot. The leader bounds this wait."""

        def look() -> m.SnapshotHere | None:
            self.check_epoch()
            here, self._snapshot = self._snapshot, None  # It may be asked for again.
            return here if here is not None and here.epoch == self.epoch else None

        here = self._wait(look, None)
        assert here.iteration == iteration
        return here

    def wait_end(self) -> None:
        """Until every slot has finished."""

        def look() -> bool | None:
            self.check_epoch()
            return True if self._end is not None else None

        self._wait(look, None)
