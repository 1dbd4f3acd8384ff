"""Trainers forked from a process that has imported everything and done nothing else.

A guardian forks its zygote first. The zygote has one thread and no device context, so that it can
fork a trainer at any time, a new one within milliseconds of a crash; it reaps them and says how
they ended. Trainers end with the zygote, the zygote with the guardian.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from deadpool.process import die_with_parent, set_process_name
from deadpool.terminal import say_error

TrainerMain = Callable[[socket.socket, bool], int]
"""Runs in the forked child with its end of a socket pair; whether it is the guardian's first
trainer. Returns the exit code."""

_KILLED = signal.SIGKILL.value
"""As a waitpid status: what became of a trainer whose zygote is gone."""


class Zygote:
    """The guardian's end: fork trainers, signal the one that lives, hear of its end.

    Made before the guardian has a thread or an event loop. preload: modules to import first.
    """

    def __init__(self, trainer_main: TrainerMain, preload: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        guardian_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                die_with_parent(guardian_pid)
                ours.close()
                code = _Nursery(theirs, trainer_main).run(preload)
            except BaseException as error:
                say_error(error)
            finally:
                _flush()
                os._exit(code)
        theirs.close()
        self._socket = ours
        self._pidfd = -1
        """Of the trainer that lives, once it is known."""
        self._is_reaped = False
        self.trainer_runs = False
        """One was asked for, and its end is not known."""
        self.is_alive = True

    def fileno(self) -> int:
        """Readable when there is news: see `read`."""
        return self._socket.fileno()

    def spawn(self) -> socket.socket:
        """Start a trainer, when none runs; our end of its socket pair."""
        assert not self.trainer_runs
        ours, theirs = socket.socketpair()
        self.trainer_runs = True
        try:
            socket.send_fds(self._socket, [b"spawn"], [theirs.fileno()])
        except OSError:
            pass  # The zygote is gone: `read` says so.
        theirs.close()
        return ours

    def read(self) -> int | None:
        """Take one piece of news: the waitpid status of the trainer's end, or None for another. The
        zygote's own end is the trainer's, too."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 12, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.is_alive = False
            return self._trainer_ended(_KILLED) if self.trainer_runs else None
        if descriptors:
            self._pidfd = descriptors[0]
            return None
        return self._trainer_ended(int(json.loads(data)["status"]))

    def _trainer_ended(self, status: int) -> int:
        self.trainer_runs = False
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return status

    def signal_trainer(self, number: int) -> None:
        """To the trainer that lives; through the zygote's death where it is too young."""
        if not self.trainer_runs:
            return
        if self._pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # It has ended; the news is on its way.
        elif number == signal.SIGKILL and not self._is_reaped:
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """End the zygote, and with it a trainer, and wait for it. May be called again."""
        if self._is_reaped:
            return
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._is_reaped = True
        self._trainer_ended(_KILLED)


class _Nursery:
    """The zygote's own code."""

    def __init__(self, sock: socket.socket, trainer_main: TrainerMain) -> None:
        self._socket = sock
        self._trainer_main = trainer_main
        self._selector = selectors.DefaultSelector()
        self._num_spawned = 0

    def run(self, preload: Sequence[str]) -> int:
        set_process_name("dp-zygote")
        # Its guardian decides; trainers get back what was.
        self._handlers = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        for name in preload:
            importlib.import_module(name)
        self._selector.register(self._socket, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, key.data)
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
                if not data:
                    return 0
                self._spawn(socket.socket(fileno=descriptors[0]))

    def _spawn(self, link: socket.socket) -> None:
        zygote_pid = os.getpid()
        self._num_spawned += 1
        _flush()
        pid = os.fork()
        if pid == 0:
            os._exit(self._run_trainer(zygote_pid, link))
        link.close()
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        socket.send_fds(self._socket, [b"spawned"], [pidfd])

    def _run_trainer(self, zygote_pid: int, link: socket.socket) -> int:
        code = 1
        try:
            die_with_parent(zygote_pid)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._selector.close()
            self._socket.close()
            set_process_name("dp-trainer")
            code = self._trainer_main(link, self._num_spawned == 1)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            say_error(error)
        finally:
            _flush()
        return code

    def _reap(self, pidfd: int, pid: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._socket.send(json.dumps({"status": status}).encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # The reader of our output is gone.
