"""What replicas cost to move: `python tools/bench_transport.py`.

The guardians' own code (`deadpool.replication`) between two processes over loopback, with its
checksums and without, beside a bare socket and a memory copy of the same bytes: GB/s, and CPU
seconds per GB of each end, its MPI sidecar included. Every size is moved again and again into the
same memory; the first round, which touches it, is left out. Exit code 2 for input that does not
fit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import mmap
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deadpool import integrity
from deadpool.arena import Arena, ReplicaShelf, available_bytes
from deadpool.mpi.bridge import Bridge
from deadpool.mpi.frames import world_key
from deadpool.mpi.world import Launcher, World, find_launcher
from deadpool.process import die_with_parent
from deadpool.protocol.events import AnswerOffer, AnswerPull
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import (
    Channel,
    ReplicaServer,
    TcpChannel,
    pull_replica,
    put_replica,
)
from tools.bench_measure import (
    format_size,
    machine,
    machine_line,
    parse_size,
    process_cpu_s,
    table,
)

HOST = "127.0.0.1"
_TOKEN = b"b" * 32
_KEY = world_key(_TOKEN, Epoch(1))
LAUNCHER = find_launcher(None, {})

METHODS = {
    "replica": "put_replica to a ReplicaServer, as guardians do",
    "no-checksum": "the same with checksums left out",
    "pull": "pull_replica from a ReplicaServer into fresh memory, as for a restore",
    "pull-no-checksum": "the same with checksums left out",
    "verify": "one process, the sums of its own snapshot, as before a restore",
    "mpi": "the replica's way by MPI sidecars, where mpi4py and mpiexec are found",
    "socket": "sendall and recv_into of blocking sockets",
    "memcpy": "one process, memory to memory",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One method at one size."""

    method: str
    num_bytes: int
    num_rounds: int
    seconds: float
    """Of one round, the median."""
    sender_s: float
    """CPU, a round, the median."""
    receiver_s: float

    @property
    def gigabytes_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    def per_gigabyte(self, seconds: float) -> float:
        return seconds / self.num_bytes * 1e9


def memory(num_bytes: int) -> memoryview:
    """Private and touched, so that no page faults are timed."""
    view = memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    for start in range(0, num_bytes, mmap.PAGESIZE):
        view[start] = start % 251
    return view


@contextlib.contextmanager
def other_process(body: Callable[[socket.socket], None]) -> Iterator[tuple[int, socket.socket]]:
    """Runs `body` with a listening socket in a child; yields its pid and the socket."""
    listener = socket.create_server((HOST, 0))
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            body(listener)
        finally:
            os._exit(1)
    try:
        yield pid, listener
    finally:
        listener.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Rounds:
    """Clocks at the end of each round. receivers: the other end's pids; senders: those that work
    for this process."""

    def __init__(self, *receivers: int, senders: Sequence[int] = ()) -> None:
        self._receivers = receivers
        self._senders = senders
        self._marks: list[tuple[float, float, float]] = []

    def mark(self) -> None:
        """A round has ended, or the first begins."""
        ours_s = time.process_time() + sum(map(process_cpu_s, self._senders))
        theirs_s = sum(map(process_cpu_s, self._receivers))
        self._marks.append((time.perf_counter(), ours_s, theirs_s))

    def figure(self, method: str, num_bytes: int) -> Figure:
        spans = [
            [end - begin for begin, end in zip(*pair, strict=True)]
            for pair in itertools.pairwise(self._marks)
        ]
        seconds, sender_s, receiver_s = map(statistics.median, zip(*spans, strict=True))
        return Figure(
            method=method,
            num_bytes=num_bytes,
            num_rounds=len(spans),
            seconds=seconds,
            sender_s=sender_s,
            receiver_s=receiver_s,
        )


def measure_memcpy(num_bytes: int, num_rounds: int) -> Figure:
    source, target = memory(num_bytes), memory(num_bytes)
    rounds = Rounds()
    rounds.mark()
    for _ in range(num_rounds):
        target[:] = source
        rounds.mark()
    return rounds.figure("memcpy", num_bytes)


def measure_socket(num_bytes: int, num_rounds: int) -> Figure:
    def receive(listener: socket.socket) -> None:
        target = memory(num_bytes)
        sock, _ = listener.accept()
        while True:
            view = target
            while view:
                view = view[sock.recv_into(view) or sys.exit() :]
            sock.sendall(b".")

    source = memory(num_bytes)
    with (
        other_process(receive) as (pid, listener),
        socket.create_connection(listener.getsockname()) as sock,
    ):
        rounds = Rounds(pid)
        for _ in range(num_rounds + 1):
            sock.sendall(source)
            sock.recv(1)
            rounds.mark()
    return rounds.figure("socket", num_bytes)


def measure_verify(num_bytes: int, num_rounds: int) -> Figure:
    async def verify() -> None:
        for _ in range(num_rounds + 1):
            await integrity.sum_chunks(source)
            rounds.mark()

    source, rounds = memory(num_bytes), Rounds()
    asyncio.run(verify())
    return rounds.figure("verify", num_bytes)


def measure_replica(method: str, num_bytes: int, num_rounds: int) -> Figure:
    """In production buffers alternate; here one is enough, as nothing reads the other."""
    given = integrity.checksum
    if method.endswith("no-checksum"):
        integrity.checksum = lambda view: 0
    try:
        return _measure_replica(method, num_bytes, num_rounds)
    finally:
        integrity.checksum = given


def _measure_replica(method: str, num_bytes: int, num_rounds: int) -> Figure:
    def hold(listener: socket.socket) -> None:
        asyncio.run(_serve(listener))

    source = memory(num_bytes)
    with (
        other_process(hold) as (pid, listener),
        socket.create_connection(listener.getsockname()) as sock,
    ):
        port = int(sock.recv(16))
        rounds = Rounds(pid)
        move = _pull if method.startswith("pull") else _put
        asyncio.run(move(port, source, num_rounds, rounds))
    return rounds.figure(method, num_bytes)


def _server() -> ReplicaServer:
    return ReplicaServer(
        shelf=ReplicaShelf(),
        token=_TOKEN,
        host=HOST,
        offered=lambda event: AnswerOffer(buffer=0, refusal=""),
        received=lambda event: AnswerOffer(
            buffer=None, refusal="" if event.checksum == event.announced else "damaged"
        ),
        asked=lambda event: AnswerPull(buffer=0, refusal=""),
        damaged=lambda event: None,
    )


async def _serve(listener: socket.socket) -> None:
    server = _server()
    sock, _ = listener.accept()
    sock.sendall(b"%d" % server.port)
    await server.serve()


async def _pull(port: int, source: memoryview, num_rounds: int, rounds: Rounds) -> None:
    await _put(port, source, 0, Rounds())
    for _ in range(num_rounds + 1):
        replica = await pull_replica(
            _holder(port), token=_TOKEN, slot=Slot(0), epoch=Epoch(1), iteration=Iteration(0)
        )
        replica.close()
        rounds.mark()


def _holder(port: int) -> Member:
    return Member(
        member=MemberId(1),
        node=Node(1),
        local_rank=0,
        host=HOST,
        control_port=1,
        data_port=port,
    )


async def _put(port: int, source: memoryview, num_rounds: int, rounds: Rounds) -> None:
    channel = await TcpChannel.connect(_holder(port), token=_TOKEN)
    with contextlib.closing(channel):
        for number in range(num_rounds + 1):
            await put_replica(
                channel,
                slot=Slot(0),
                epoch=Epoch(1),
                iteration=Iteration(number),
                payload=source,
            )
            rounds.mark()


def measure_mpi(num_bytes: int, num_rounds: int) -> Figure:
    """The figure's time has no start of the world in it."""

    def hold(listener: socket.socket) -> None:
        asyncio.run(_hold_mpi(listener))

    with (
        other_process(hold) as (pid, listener),
        socket.create_connection(listener.getsockname()) as sock,
    ):
        arena = Arena.create()
        arena.resize(num_bytes)
        return asyncio.run(_put_mpi(arena.payload(0), num_rounds, pid, sock))


def _bridge(
    slot: int, serve: Callable[[Channel], Coroutine[Any, Any, None]]
) -> tuple[Bridge, asyncio.Future[str]]:
    """A sidecar's guardian, and its library once the world is up."""
    loop = asyncio.get_running_loop()
    library: asyncio.Future[str] = loop.create_future()
    bridge = Bridge(
        key=_KEY,
        slot=Slot(slot),
        serve=serve,
        start=loop.create_task,
        up=library.set_result,
        ended=lambda reason: None,
    )
    bridge.open()
    return bridge, library


async def _hold_mpi(listener: socket.socket) -> None:
    bridge, library = _bridge(1, _server().serve_channel)
    sock, _ = listener.accept()
    await library
    sock.sendall(b"%d" % bridge.sidecar_pid)
    await asyncio.Event().wait()


async def _put_mpi(
    source: memoryview, num_rounds: int, receiver: int, sock: socket.socket
) -> Figure:
    assert isinstance(LAUNCHER, Launcher)
    bridge, library = _bridge(0, _server().serve_channel)
    world = World(LAUNCHER, [_holder(port=1), _holder(port=1)], _KEY)
    launched = asyncio.create_task(world.run())
    try:
        await asyncio.wait([library, launched], return_when=asyncio.FIRST_COMPLETED)
        if launched.done():
            raise OSError(f"no MPI world: {launched.result()}")
        loop = asyncio.get_running_loop()
        theirs = int(await loop.run_in_executor(None, sock.recv, 16))
        rounds = Rounds(receiver, theirs, senders=[bridge.sidecar_pid])
        for number in range(num_rounds + 1):
            await put_replica(
                bridge.channel_to(Slot(1)),
                slot=Slot(0),
                epoch=Epoch(1),
                iteration=Iteration(number),
                payload=source,
            )
            rounds.mark()
        return rounds.figure(f"mpi ({library.result()})", len(source))
    finally:
        bridge.close()
        world.stop()
        await launched


MEASURES: dict[str, Callable[[int, int], Figure]] = {
    **{
        method: functools.partial(measure_replica, method)
        for method in ("replica", "no-checksum", "pull", "pull-no-checksum")
    },
    "verify": measure_verify,
    "mpi": measure_mpi,
    "socket": measure_socket,
    "memcpy": measure_memcpy,
}


def num_rounds_for(num_bytes: int, total_bytes: int) -> int:
    return max(3, min(200, total_bytes // num_bytes))


def show(figures: Sequence[Figure]) -> str:
    rows = [
        [
            f"{format_size(f.num_bytes):>8}  {f.method}",
            str(f.num_rounds),
            f"{f.seconds * 1e3:.2f}",
            f"{f.gigabytes_per_s:.2f}",
            f"{f.per_gigabyte(f.sender_s):.3f}",
            f"{f.per_gigabyte(f.receiver_s):.3f}",
        ]
        for f in figures
    ]
    header = ["    size  method", "rounds", "ms", "GB/s", "sender s/GB", "receiver s/GB"]
    return table(header, rows)


def checksum_share(figures: Sequence[Figure]) -> list[str]:
    """How much of a replica's CPU time its two checksums are, in words."""
    cpu = {(f.method, f.num_bytes): f.sender_s + f.receiver_s for f in figures}
    return [
        f"{format_size(size)}: checksums take {100 * (1 - cpu['no-checksum', size] / used):.0f} % "
        "of a replica's CPU time"
        for (method, size), used in cpu.items()
        if method == "replica" and ("no-checksum", size) in cpu
    ]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="GB/s and CPU seconds of the replicas' way.")
    parser.add_argument(
        "--sizes", nargs="+", default=["1MiB", "16MiB", "128MiB", "1GiB"], metavar="SIZE"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[name for name in METHODS if name != "mpi" or isinstance(LAUNCHER, Launcher)],
        choices=list(METHODS),
        help="; ".join(f"{name}: {text}" for name, text in METHODS.items()),
    )
    parser.add_argument(
        "--total", default="2GiB", metavar="SIZE", help="to move for a figure (default: 2GiB)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        sizes, total = [parse_size(text) for text in args.sizes], parse_size(args.total)
    except ValueError as error:
        parser.error(str(error))
    if "mpi" in args.methods and isinstance(LAUNCHER, str):
        parser.error(f"--methods mpi: {LAUNCHER}")
    needed, has = 2 * max(sizes), available_bytes()
    if needed > 0.9 * has:
        parser.error(
            f"--sizes {format_size(max(sizes))} takes {format_size(needed)} of memory at both "
            f"ends, {format_size(has)} are free: give smaller sizes"
        )
    result: dict[str, Any] = {"machine": machine(), "figures": []}
    print(machine_line(result["machine"]), flush=True)
    figures = []
    for size in sizes:
        for method in args.methods:
            if sys.stderr.isatty():
                print(f"\r\x1b[K{format_size(size)} {method} ...", end="", file=sys.stderr)
            figures.append(MEASURES[method](size, num_rounds_for(size, total)))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(show(figures))
    print("\n".join(checksum_share(figures)))
    print(f"load average at the end: {' '.join(f'{x:.2f}' for x in os.getloadavg())}")
    if args.json:
        result["figures"] = [
            {**dataclasses.asdict(f), "gigabytes_per_s": f.gigabytes_per_s} for f in figures
        ]
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
