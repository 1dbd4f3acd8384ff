"""Starts virtual nodes by forking a process that has imported torch and megatron-core.

Importing costs about 8 s of CPU a process; a fork takes milliseconds. The server is a child of the
launcher and single-threaded, so that forking is safe. It ends, and every node with it, when the
launcher's end of the socket closes, however the launcher ended.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from deadpool.process import die_with_parent, exit_code_of, set_process_name
from deadpool.terminal import say_error

_FORWARDED = (signal.SIGTERM, signal.SIGINT)
"""What a node passes on to its ranks."""

PRELOAD = ("torch", "megatron.core", "megatron.training.pretrain", "deadpool.integrations.megatron")


class ForkServer:
    """The launcher's end: start nodes, hear of their end.

    Over `socket`, JSON lines. {"check": environ} runs the script once in the role of a check and
    is answered by {"checked": exit code}. {"start": node, "environs": [environ, ...]} starts a
    rank process for each environment, all in a session of their own; it is answered by
    {"started": node, "pid": pid}, and at the node's end by {"ended": node, "code": exit code,
    "by_signal": whether it, or one of its ranks, did not choose to}.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        launcher_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with_parent(launcher_pid)
                ours.close()
                code = _Server(theirs, script, list(arguments)).run()
            except BaseException as error:
                say_error(error)
            finally:
                os._exit(code)
        theirs.close()
        self.socket = ours

    def close(self) -> None:
        """End the server and every node still alive, and wait for it."""
        self.socket.close()
        os.waitpid(self.pid, 0)


@dataclasses.dataclass(slots=True)
class _Child:
    kind: str
    node: int
    pid: int


class _Server:
    def __init__(self, sock: socket.socket, script: str, arguments: list[str]) -> None:
        self._socket = sock
        self._script = script
        self._arguments = arguments
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        set_process_name("dp-forkserver")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name in PRELOAD:
            importlib.import_module(name)
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._answer({"ready": True})
        pending = b""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._socket:
                    self._reap(key.data)
                    continue
                data = self._socket.recv(1 << 16)
                if not data:
                    self._kill_all()
                    return 0
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            pass  # The launcher is gone: the next read says so.

    def _obey(self, command: dict[str, Any]) -> None:
        if "check" in command:
            pid = self._fork(lambda: self._run_check(command["check"]))
            self._watch(_Child("check", -1, pid))
        else:
            node = command["start"]
            pid = self._fork(lambda: self._run_node(command["environs"]))
            self._watch(_Child("node", node, pid))
            self._answer({"started": node, "pid": pid})

    def _watch(self, child: _Child) -> None:
        descriptor = os.pidfd_open(child.pid)
        self._children[descriptor] = child
        self._selector.register(descriptor, selectors.EVENT_READ, descriptor)

    def _reap(self, descriptor: int) -> None:
        child = self._children.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child.pid, 0)
        code = exit_code_of(status)
        if child.kind == "check":
            self._answer({"checked": code})
        else:
            _kill_group(child.pid)
            by_signal = os.WIFSIGNALED(status)
            self._answer({"ended": child.node, "code": code, "by_signal": by_signal})

    def _kill_all(self) -> None:
        for child in self._children.values():
            _kill_group(child.pid)
            os.waitpid(child.pid, 0)

    def _fork(self, body: Any) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        # What comes before the child is ready for it waits there.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        pid = os.fork()
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
            return pid
        code = 1
        try:
            os.setsid()
            die_with_parent(parent)
            self._selector.close()
            self._socket.close()
            for descriptor in self._children:
                os.close(descriptor)
            code = body()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            say_error(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run_node(self, environs: list[dict[str, str]]) -> int:
        """The node: parent of its rank processes, to which it passes SIGTERM and SIGINT on. Ends
        when all have ended: by SIGKILL if one of them was ended by a signal, else with the highest
        exit code."""
        set_process_name("dp-node")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        alive = {self._fork_rank(environ) for environ in environs}
        statuses: list[int] = []
        while alive:
            number = signal.sigwait({signal.SIGCHLD, *_FORWARDED})
            if number != signal.SIGCHLD:
                for pid in alive:
                    os.kill(pid, number)  # Not reaped, so still that process.
                continue
            for pid in list(alive):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    alive.remove(pid)
                    statuses.append(status)
        if any(os.WIFSIGNALED(status) for status in statuses):
            os.kill(os.getpid(), signal.SIGKILL)
        return max(map(exit_code_of, statuses))

    def _fork_rank(self, environ: dict[str, str]) -> int:
        node_pid = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        code = 1
        try:
            die_with_parent(node_pid)
            # Until the guardian has its handlers, either signal just ends it.
            for number in _FORWARDED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *_FORWARDED})
            code = self._run_script(environ)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:
            say_error(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _run_check(self, environ: dict[str, str]) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return self._run_script(environ)

    def _run_script(self, environ: dict[str, str]) -> int:
        os.environ.update(environ)
        sys.argv = [self._script, *self._arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(self._script)))
        runpy.run_path(self._script, run_name="__main__")
        return 0


def _kill_group(leader_pid: int) -> None:
    try:
        os.killpg(leader_pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # All of it has ended.
