"""The sidecar: `python -m deadpool.mpi.sidecar NUM_SLOTS`, one a slot, under an MPI launcher.

Moves bytes between memory that guardians own, and decides nothing. It attaches to the guardian of
the slot that its MPI rank is; it ends when that connection does, without MPI_Finalize, which can
hang. One thread; nothing waits inside MPI, where waiting spins.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import mmap
import os
import select
import socket
import sys
import time
from typing import Any, NoReturn

from deadpool.handshake import Dialer, NotOfThisJob, Purpose
from deadpool.mpi import frames as f
from deadpool.process import set_process_name
from deadpool.terminal import say

START_TIMEOUT_S = 30.0
"""Bound of finding the guardian, which may learn of the epoch later; then of finding the others."""
_RETRY_S = 0.02
_POLL_S = 0.0005
"""Between two looks at MPI while something moves. A look is some 10 us."""
_IDLE_POLL_S = 0.002

_TO_HOLDER, _TO_OWNER, _PAYLOAD = 1, 2, 3
"""Tags. Payloads only go from an owner to its holder."""


class Link:
    """The connection to the guardian."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def attach(cls, key: bytes, slot: int) -> Link:
        """Raises TimeoutError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            sock = f.packet_socket()
            sock.settimeout(START_TIMEOUT_S)
            try:
                sock.connect(f.address(key, slot))
                dialer = Dialer(key, Purpose.SIDECAR)
                sock.sendall(dialer.opening)
                while dialer.wanted:
                    sock.sendall(dialer.receive(sock.recv(dialer.wanted)))
                return cls(sock)
            except (OSError, NotOfThisJob):
                sock.close()
                time.sleep(_RETRY_S)
        raise TimeoutError(f"the guardian of slot {slot} did not answer")

    def send(self, frame: f.Moved | f.Say | f.Up | f.Failed) -> None:
        self._socket.sendall(f.encode(frame))

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def receive(self) -> tuple[Any, int | None]:
        """A frame, and the descriptor that came with it. Raises EOFError."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, f.MAX_PACKET_BYTES, 1)
        if not data:
            raise EOFError
        return f.decode(data), descriptors[0] if descriptors else None


class Mappings:
    """Files mapped once for all payloads: a new mapping of a GB costs 0.1 s of page faults."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int, int], mmap.mmap] = {}

    def view(self, descriptor: int, offset: int, num_bytes: int) -> memoryview:
        """Takes the descriptor."""
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino, status.st_size)
        if key not in self._maps:
            self._maps[key] = mmap.mmap(descriptor, status.st_size)
        os.close(descriptor)
        return memoryview(self._maps[key])[offset : offset + num_bytes]


@dataclasses.dataclass(slots=True)
class _Stream:
    """The payloads between this rank and a peer, one way: cut into chunks, in order."""

    waiting: collections.deque[memoryview]
    in_flight: collections.deque[tuple[Any, memoryview]]


class Mover:
    """Carries out what the guardian asks, until the guardian goes."""

    def __init__(self, mpi: Any, world: Any, link: Link) -> None:
        self._mpi = mpi
        self._world = world
        self._link = link
        self._mappings = Mappings()
        self._streams: dict[tuple[int, bool], _Stream] = {}
        self._saying: list[tuple[Any, bytearray]] = []
        self._hearing = {tag: self._listen(tag) for tag in (_TO_HOLDER, _TO_OWNER)}

    def run(self) -> NoReturn:
        """Raises EOFError when the guardian has gone."""
        while True:
            is_busy = bool(self._streams or self._saying)
            while self._link.wait(_POLL_S if is_busy else _IDLE_POLL_S):
                self._obey(*self._link.receive())
                is_busy = True
                if not self._link.wait(0):
                    break
            self._hear()
            self._saying = [said for said in self._saying if not said[0].Test()]
            for key in list(self._streams):
                self._advance(key)

    def _obey(self, frame: Any, descriptor: int | None) -> None:
        if isinstance(frame, f.Say):
            tag = _TO_OWNER if frame.peer == frame.owner else _TO_HOLDER
            body = bytearray(frame.body)
            self._saying.append((self._world.Isend(self._raw(body), frame.peer, tag), body))
            return
        assert isinstance(frame, f.Move) and descriptor is not None, frame
        view = self._mappings.view(descriptor, frame.offset, frame.num_bytes)
        stream = self._streams.setdefault(
            (frame.peer, frame.is_send), _Stream(collections.deque(), collections.deque())
        )
        for start in range(0, len(view), f.CHUNK_BYTES):
            stream.waiting.append(view[start : start + f.CHUNK_BYTES])

    def _raw(self, buffer: bytearray | memoryview) -> list[Any]:
        return [buffer, self._mpi.BYTE]

    def _listen(self, tag: int) -> tuple[Any, bytearray]:
        buffer = bytearray(f.MAX_PACKET_BYTES)
        return self._world.Irecv(self._raw(buffer), self._mpi.ANY_SOURCE, tag), buffer

    def _hear(self) -> None:
        for tag in (_TO_HOLDER, _TO_OWNER):
            request, buffer = self._hearing[tag]
            status = self._mpi.Status()
            if not request.Test(status):
                continue
            peer = status.Get_source()
            owner = peer if tag == _TO_HOLDER else self._world.rank
            body = bytes(buffer[: status.Get_count(self._mpi.BYTE)])
            self._hearing[tag] = self._listen(tag)
            self._link.send(f.Say(peer=peer, owner=owner, body=body))

    def _advance(self, key: tuple[int, bool]) -> None:
        (peer, is_send), stream = key, self._streams[key]
        while stream.in_flight and stream.in_flight[0][0].Test():
            _, chunk = stream.in_flight.popleft()
            self._link.send(f.Moved(peer=peer, is_send=is_send, num_bytes=len(chunk)))
        while stream.waiting and len(stream.in_flight) < f.MAX_IN_FLIGHT:
            chunk = stream.waiting.popleft()
            start = self._world.Isend if is_send else self._world.Irecv
            stream.in_flight.append((start(self._raw(chunk), peer, _PAYLOAD), chunk))
        if not stream.in_flight:
            del self._streams[key]


def main(argv: list[str]) -> NoReturn:
    """Never returns: the process ends here, whatever MPI holds."""
    set_process_name("dp-sidecar")
    key = bytes.fromhex(os.environ.pop(f.KEY_VARIABLE))
    code = 1
    link = None
    try:
        import mpi4py

        mpi4py.rc(threads=False, finalize=False)
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if world.size != int(argv[0]):
            raise RuntimeError(
                f"a world of {world.size} instead of {argv[0]} ranks: the launcher is of another "
                f"MPI than mpi4py's ({_library(MPI)})"
            )
        link = Link.attach(key, world.rank)
        _meet(world, link)
        session = os.environ.get("PMIX_SERVER_TMPDIR", "")
        link.send(f.Up(library=_library(MPI), session=session))
        Mover(MPI, world, link).run()
    except EOFError:
        code = 0  # The epoch has ended, or its guardian.
    except OSError as error:
        if link is None or error.errno not in (errno.EPIPE, errno.ECONNRESET):
            say(f"{f.SIDECAR_SAYS}{error}", is_error=True)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        say(f"{f.SIDECAR_SAYS}{reason}", is_error=True)
        if link is not None:
            try:
                link.send(f.Failed(reason=reason[:1000]))
            except OSError:
                pass  # It has gone as well.
    finally:
        f.sweep(f.segments("self"))
        os._exit(code)


def _library(mpi: Any) -> str:
    """Name and version, e.g. MPICH 5.0.2."""
    line = str(mpi.Get_library_version()).split("\n")[0].split(",")[0]
    return " ".join(line.replace("Version:", "").replace("Open MPI v", "Open MPI ").split())[:80]


def _meet(world: Any, link: Link) -> None:
    """Until every rank has attached. Raises TimeoutError, and EOFError as `Mover.run`."""
    request = world.Ibarrier()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not request.Test():
        if link.wait(_IDLE_POLL_S):
            link.receive()
        if time.monotonic() > deadline:
            raise TimeoutError("not every sidecar has found its guardian")


if __name__ == "__main__":
    main(sys.argv[1:])
