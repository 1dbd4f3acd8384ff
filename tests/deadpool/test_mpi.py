"""Replicas by MPI sidecars: the same bytes, the same refusals, and TCP when the world is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadpool.arena import Arena, ReplicaShelf, locate
from deadpool.config import ConfigError, parse_config
from deadpool.messages import Offer
from deadpool.mpi import bridge, frames, world
from deadpool.mpi.bridge import Bridge, BridgeState
from deadpool.mpi.choice import NUM_ROUNDS, Choice, Way
from deadpool.mpi.world import (
    Kind,
    Launcher,
    World,
    find_launcher,
    host_list,
    kind_of,
    world_command,
    world_environ,
)
from deadpool.protocol.events import AnswerOffer, AnswerPull, Offered, Received
from deadpool.protocol.types import Epoch, Iteration, Member, MemberId, Node, Slot
from deadpool.replication import (
    Channel,
    ReplicaRefused,
    ReplicaServer,
    TcpChannel,
    put_replica,
)
from deadpool.wire import WireError
from tests.deadpool.test_job import node_processes
from tests.deadpool.test_membership import GATED, hold, wait_until

LAUNCHER = find_launcher(None, {})
needs_mpi = pytest.mark.skipif(isinstance(LAUNCHER, str), reason=str(LAUNCHER))

TOKEN = b"the job's token, at least this long"
EPOCH = Epoch(5)
BOUND_S = 90.0
"""Of a whole test: only a hang takes so long."""
PAYLOAD_BYTES = 3 * frames.CHUNK_BYTES + 4097


class Guardian:
    """One slot's arena, shelf, server and bridge, and decisions like the core's: buffer 0, checked
    and of the epoch."""

    def __init__(self, slot: int, key: bytes, num_bytes: int) -> None:
        self.slot = Slot(slot)
        self.shelf = ReplicaShelf()
        self.arena = Arena.create()
        self.arena.resize(num_bytes)
        self.staged: list[tuple[Slot, Iteration]] = []
        self.server = ReplicaServer(
            shelf=self.shelf,
            token=TOKEN,
            host="127.0.0.1",
            offered=self.offered,
            received=self.received,
            asked=lambda event: AnswerPull(buffer=None, refusal="a test"),
            damaged=lambda event: None,
        )
        self.up = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.bridge = Bridge(
            key=key,
            slot=self.slot,
            serve=self.server.serve_channel,
            start=asyncio.get_running_loop().create_task,
            up=lambda library: self.up.set(),
            ended=self.ended.set_result,
        )
        self.member = member(slot, self.server.port)

    def close(self) -> None:
        os.close(self.arena.descriptor)
        self.shelf.close()

    def offered(self, event: Offered) -> AnswerOffer:
        if event.epoch != EPOCH:
            return AnswerOffer(buffer=None, refusal=f"epoch {event.epoch}, now is {EPOCH}")
        return AnswerOffer(buffer=0, refusal="")

    def received(self, event: Received) -> AnswerOffer:
        if event.checksum != event.announced:
            return AnswerOffer(buffer=None, refusal="checksum")
        self.staged.append((event.slot, event.iteration))
        return AnswerOffer(buffer=None, refusal="")

    def fill(self, seed: int) -> bytes:
        payload = self.arena.payload(0)
        pattern = bytes((seed + k * k) % 251 for k in range(4099))
        payload[:] = (pattern * (len(payload) // len(pattern) + 1))[: len(payload)]
        return bytes(payload)

    async def put(self, holder: Slot, iteration: int, **changes: Any) -> int:
        given: dict[str, Any] = {
            "slot": self.slot,
            "epoch": EPOCH,
            "iteration": Iteration(iteration),
            "payload": self.arena.payload(0),
            **changes,
        }
        return await put_replica(self.bridge.channel_to(holder), **given)


async def put_by_tcp(owner: Guardian, holder: Guardian) -> None:
    with contextlib.closing(await TcpChannel.connect(holder.member, token=TOKEN)) as channel:
        await put_replica(
            channel,
            slot=owner.slot,
            epoch=EPOCH,
            iteration=Iteration(7),
            payload=owner.arena.payload(0),
        )


def member(slot: int, data_port: int = 1, host: str = "127.0.0.1") -> Member:
    return Member(
        member=MemberId(100 + slot),
        node=Node(slot),
        local_rank=0,
        host=host,
        control_port=1,
        data_port=data_port,
    )


@contextlib.asynccontextmanager
async def guardians(number: int, num_bytes: int = PAYLOAD_BYTES) -> AsyncIterator[list[Guardian]]:
    """With an MPI world that is up."""
    assert isinstance(LAUNCHER, Launcher)
    key = frames.world_key(TOKEN, EPOCH)
    running = [Guardian(slot, key, num_bytes) for slot in range(number)]
    servers = [asyncio.create_task(each.server.serve()) for each in running]
    for each in running:
        each.bridge.open()
    one_world = World(LAUNCHER, [each.member for each in running], key)
    launched = asyncio.create_task(one_world.run())
    try:
        ups = asyncio.gather(*(each.up.wait() for each in running))
        await asyncio.wait([asyncio.ensure_future(ups), launched], return_when="FIRST_COMPLETED")
        assert not launched.done(), launched.result()
        yield running
    finally:
        for each in running:
            each.bridge.close()
        one_world.stop()
        await launched
        for server in servers:
            server.cancel()
        await asyncio.gather(*servers, return_exceptions=True)
        for each in running:
            each.close()


def sidecars() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [p for p in below if "deadpool.mpi.sidecar" in " ".join(_cmdline(p))]


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to its end and see that no task, process or shared memory is left."""

    async def bounded() -> None:
        await asyncio.wait_for(test(), BOUND_S)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=20)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    before = set(os.listdir("/dev/shm"))
    ours = set(psutil.Process().children(recursive=True))  # Of the tests before.
    asyncio.run(bounded())
    gc.collect()  # Views of replicas in tracebacks.
    left = set(psutil.Process().children(recursive=True)) - ours
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not sidecars() and not alive, alive
    assert set(os.listdir("/dev/shm")) <= before


@needs_mpi
@pytest.mark.parametrize("num_bytes", [1, 5000, frames.CHUNK_BYTES, PAYLOAD_BYTES])
def test_replica_by_sidecars_equals_the_source(num_bytes):
    async def test() -> None:
        async with guardians(2, num_bytes) as (first, second):
            sources = [each.fill(each.slot + 3) for each in (first, second)]
            # Both ways at once, as in a ring of two; then again into the same memory.
            for iteration in (7, 8):
                moved = await asyncio.gather(
                    first.put(second.slot, iteration), second.put(first.slot, iteration)
                )
                assert moved == [num_bytes, num_bytes]
            assert bytes(second.shelf.view(first.slot, 0)) == sources[0]
            assert bytes(first.shelf.view(second.slot, 0)) == sources[1]

    run(test)


@needs_mpi
def test_byte_flipped_on_its_way_is_refused_and_the_world_goes_on():
    async def test() -> None:
        async with guardians(2) as (first, second):
            source = first.fill(1)

            async def flip() -> None:
                """Between the chunk's checksum and its sending."""
                first.arena.payload(0)[frames.CHUNK_BYTES * 3 - 1] ^= 1

            with pytest.raises(ReplicaRefused, match="checksum"):
                await first.put(second.slot, 7, halfway=flip)
            assert second.staged == []
            await flip()
            await first.put(second.slot, 8)
            assert bytes(second.shelf.view(first.slot, 0)) == source

    run(test)


@needs_mpi
def test_offer_of_another_epoch_is_refused_and_moves_nothing():
    async def test() -> None:
        async with guardians(2, 5000) as (first, second):
            with pytest.raises(ReplicaRefused, match="epoch 4, now is 5"):
                await first.put(second.slot, 7, epoch=Epoch(4))
            assert second.shelf.num_bytes == 0

    run(test)


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1], ids=["owner", "holder"])
def test_sidecar_lost_in_a_put_leaves_the_epoch_to_tcp(monkeypatch, victim, number):
    monkeypatch.setattr(bridge, "STALL_TIMEOUT_S", 1.0)
    monkeypatch.setattr(bridge.SidecarChannel, "answer_timeout_s", 1.0)

    async def test() -> None:
        async with guardians(2) as running:
            first, second = running
            source = first.fill(9)

            async def lose() -> None:
                os.kill(running[victim].bridge.sidecar_pid, number)

            with pytest.raises(WireError):
                await first.put(second.slot, 7, halfway=lose)
            first.bridge.give_up("as Transfers does")
            assert second.staged == []
            # The same epoch, at once, while the holder may still wait for MPI.
            await put_by_tcp(first, second)
            assert second.staged == [(first.slot, 7)]
            assert await first.ended and await second.ended
            assert {each.bridge.state for each in running} == {BridgeState.ENDED}
            assert bytes(second.shelf.view(first.slot, 0)) == source

    run(test)


@needs_mpi
def test_memory_of_a_put_that_was_given_up_is_not_used_again():
    """The sidecar may write into it after the guardian has turned away."""

    async def test() -> None:
        async with guardians(2) as (first, second):
            first.fill(9)
            abandoned: list[tuple[int, int]] = []

            async def give_up() -> None:
                while not second.shelf.num_bytes:
                    await asyncio.sleep(0.001)
                view = second.shelf.view(first.slot, 0)
                abandoned.append(identity(view))
                first.bridge.give_up("a test")

            with pytest.raises(WireError):
                await first.put(second.slot, 7, halfway=give_up)
            await second.ended
            await asyncio.sleep(0)
            assert identity(second.shelf.memory(first.slot, 0, PAYLOAD_BYTES)) != abandoned[0]

    run(test)


class SilentChannel(Channel):
    """Brings an offer, and then nothing, as from an owner that has given the way up."""

    outlives_owner = True
    peer = "nobody"

    def __init__(self, offer: Offer) -> None:
        self._offer: Offer | None = offer

    async def send(self, message: Any) -> None:
        pass

    async def send_bytes(self, view: memoryview) -> None:
        raise AssertionError

    async def receive(self, first_byte_timeout_s: float | None = None) -> Any:
        assert self._offer is not None
        offer, self._offer = self._offer, None
        return offer

    async def receive_bytes(self, view: memoryview) -> None:
        await asyncio.Event().wait()


def test_put_by_tcp_does_not_wait_for_the_same_slots_put_by_mpi():
    async def test() -> None:
        key = frames.world_key(TOKEN, EPOCH)
        first, second = Guardian(0, key, 5000), Guardian(1, key, 5000)
        servers = asyncio.create_task(second.server.serve())
        offer = Offer(
            slot=first.slot, epoch=EPOCH, iteration=Iteration(7), num_bytes=5000, checksum=None
        )
        silent = asyncio.create_task(second.server.serve_channel(SilentChannel(offer)))
        while not second.shelf.num_bytes:
            await asyncio.sleep(0)
        await put_by_tcp(first, second)
        assert second.staged == [(first.slot, 7)] and silent.cancelled()
        servers.cancel()
        await asyncio.gather(servers, return_exceptions=True)
        first.close()
        second.close()

    run(test)


def identity(view: memoryview) -> tuple[int, int]:
    status = os.fstat(locate(view)[0])
    return status.st_dev, status.st_ino


def test_stranger_on_the_guardians_socket_is_refused():
    async def test() -> None:
        key = frames.world_key(TOKEN, EPOCH)
        guardian = Guardian(0, key, 10)
        servers = asyncio.create_task(guardian.server.serve())
        guardian.bridge.open()
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        for data in (b"nonsense", b""):
            with frames.packet_socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, frames.address(key, 0))
                if data:
                    await loop.sock_sendall(sock, data)
                    assert await loop.sock_recv(sock, 100) == b""
        assert guardian.bridge.state is BridgeState.WAITING
        guardian.bridge.close()
        servers.cancel()
        await asyncio.gather(servers, return_exceptions=True)
        guardian.close()

    run(test)


def test_key_and_address_are_of_one_epoch_and_slot():
    keys = {frames.world_key(TOKEN, Epoch(epoch)) for epoch in range(3)}
    assert len({frames.address(key, slot) for key in keys for slot in range(3)}) == 9


@needs_mpi
def test_world_of_another_mpi_says_so():
    """A launcher that mpi4py's library does not know leaves every rank alone."""

    async def test() -> None:
        key = frames.world_key(TOKEN, EPOCH)
        said = await World(Launcher(command=("nice",)), [member(0), member(1)], key).run()
        assert "a world of 1 instead of 2 ranks: the launcher is of another MPI" in said

    run(test)


def test_start_without_mpi_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install mpi4py mpich"):
        parse_config(["--deadpool-transport", "mpi"])
    assert parse_config([])[0].mpi_launcher is None


def test_launcher_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="no such program"):
        parse_config(["--deadpool-mpi-launcher", "/nowhere/mpiexec -x"])
    with pytest.raises(ConfigError, match="no use"):
        parse_config("--deadpool-transport tcp --deadpool-mpi-launcher sh".split())
    config, _ = parse_config(["--deadpool-mpi-launcher", "sh -c 'a b'"])
    assert config.mpi_launcher == Launcher(command=("sh", "-c", "a b"))
    monkeypatch.setattr(world.shutil, "which", lambda name: f"/bin/{name}")
    assert find_launcher(None, {"SLURM_JOB_ID": "1"}) == Launcher(command=("srun",))


def test_hosts_are_listed_in_rank_order():
    assert host_list([member(0), member(1)]) is None
    hosts = [member(s, host=h) for s, h in enumerate(["a", "a", "b", "a"])]
    assert host_list(hosts) == "a:2,b:1,a:1"


@pytest.mark.parametrize(
    ("command", "version", "kind", "words"),
    [
        ("mpiexec", "HYDRA build details:", Kind.HYDRA, "-n 2 -hosts a:1,b:1"),
        ("mpiexec", "mpiexec (Open MPI) 5.0.11", Kind.OPENMPI, "--host a:1,b:1"),
        ("/usr/bin/srun", "slurm 22.05", Kind.SLURM, "--overlap --distribution=arbitrary"),
        ("aprun", "", Kind.OTHER, "aprun -n 2 "),
    ],
)
def test_command_of_a_world_fits_its_launcher(command, version, kind, words):
    assert kind_of(command, version) is kind
    slots = [member(0, host="a"), member(1, host="b")]
    made = " ".join(world_command(Launcher(command=(command,)), kind, slots))
    assert words in made and made.endswith("-m deadpool.mpi.sidecar 2")


def test_secrets_of_the_job_do_not_reach_a_worlds_environment():
    environ = {
        "DEADPOOL_TOKEN": "secret", "PMI_RANK": "3", "SLURM_NTASKS": "9", "SLURM_JOB_ID": "1",
        "OMPI_MCA_btl": "self", "OMPI_COMM_WORLD_RANK": "1", "PATH": "/bin",
    }  # fmt: skip
    made = world_environ(environ, Kind.SLURM, b"\1", "/hosts")
    assert made == {
        "SLURM_JOB_ID": "1", "PATH": "/bin", "SLURM_HOSTFILE": "/hosts", "DEADPOOL_MPI_KEY": "01",
    }  # fmt: skip
    assert world_environ(environ, Kind.OPENMPI, b"\1", None)["OMPI_MCA_btl"] == "self"


# Which way


def test_choice_takes_turns_then_the_faster():
    choice = Choice(measures=True)
    assert choice.pick(mpi_is_up=False) is Way.TCP
    ways, decided = [], []
    for _ in range(2 * NUM_ROUNDS):
        ways.append(choice.pick(mpi_is_up=True))
        decided.append(choice.note(ways[-1], 10**9, 0.5 if ways[-1] is Way.MPI else 1.0))
    assert ways == [Way.TCP, Way.MPI] * NUM_ROUNDS
    assert decided == [False] * (2 * NUM_ROUNDS - 1) + [True]
    assert choice.gigabytes_per_s(Way.MPI) == 2.0
    assert choice.verdict is Way.MPI
    assert choice.pick(mpi_is_up=True) is Way.MPI
    assert choice.pick(mpi_is_up=False) is Way.TCP
    assert not choice.note(Way.MPI, 10**9, 9.0)


def test_choice_counts_no_put_that_moved_nothing():
    choice = Choice(measures=True)
    for way in list(Way) * NUM_ROUNDS:
        assert not choice.note(way, 0, 1.0)
    assert Choice(measures=False).pick(mpi_is_up=True) is Way.MPI


# Whole jobs

LAUNCH = ["--nodes", "3", "--ranks-per-node", "2", "--spare-nodes", "1"]
FLAGS = "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --bf16 --train-iters 40".split()
BY_MPI = ["--deadpool-transport", "mpi"]


def wait_for_words(log_dir: Path, words: str) -> None:
    output = log_dir.parent / "output"
    wait_until(lambda: output.exists() and words in output.read_text(), f"no {words!r}", 120)


@needs_mpi
@pytest.mark.parametrize("victim", [0, 1], ids=["world-starts-there", "other"])
def test_job_by_mpi_survives_a_node_and_goes_on_by_mpi(run_job, peace, victim):
    before = set(os.listdir("/dev/shm"))
    unfailed = peace(LAUNCH, FLAGS)

    def kill(pid: int, log_dir: Path) -> None:
        gate = hold(log_dir, 39)
        wait_for_words(log_dir, "epoch 1: replicas go by mpi")
        os.killpg(node_processes(pid)[victim].pid, signal.SIGKILL)
        wait_for_words(log_dir, "epoch 2: replicas go by mpi")
        gate.unlink()

    job = run_job(LAUNCH, [*FLAGS, *BY_MPI], during=kill, script=GATED)
    job.check_clean()
    assert [(s["nodes_lost"], s["spares_used"]) for s in job.swaps] == [([victim], [2])]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters
    assert set(os.listdir("/dev/shm")) <= before


@needs_mpi
def test_job_whose_launcher_is_of_another_mpi_says_so_and_trains(run_job):
    few = [*FLAGS[:-1], "12"]

    def wait(pid: int, log_dir: Path) -> None:
        gate = hold(log_dir, 12)
        wait_for_words(log_dir, "no MPI world: RuntimeError: a world of 1 instead of 4 ranks")
        gate.unlink()

    # `nice -n 4 python ...` starts one rank that knows of no others.
    job = run_job(
        LAUNCH, [*few, *BY_MPI, "--deadpool-mpi-launcher", "nice"], during=wait, script=GATED
    )
    job.check_clean()
    assert len(job.losses) == 12


@needs_mpi
def test_job_whose_sidecar_is_killed_loses_nothing(run_job, peace):
    unfailed = peace(LAUNCH, FLAGS)

    def kill(pid: int, log_dir: Path) -> None:
        gate = hold(log_dir, 39)
        wait_for_words(log_dir, "epoch 1: replicas go by mpi")
        below = psutil.Process(pid).children(recursive=True)
        next(p for p in below if p.name() == "dp-sidecar").kill()
        wait_for_words(log_dir, "replicas go by tcp")
        gate.unlink()

    job = run_job(LAUNCH, [*FLAGS, *BY_MPI], during=kill, script=GATED)
    job.check_clean()
    assert job.output.count("the MPI world is gone") == 1
    assert job.swaps == [] and not [
        r for r in job.records("events.jsonl") if r["event"] == "repair"
    ]
    assert job.losses == unfailed.losses
    assert job.parameters == unfailed.parameters


@needs_mpi
def test_job_left_to_itself_measures_both_ways_and_says_which(run_job):
    large = "--hidden-size 256 --global-batch-size 2 --train-iters 25 --bf16".split()

    def wait(pid: int, log_dir: Path) -> None:
        gate = hold(log_dir, 25)
        wait_for_words(log_dir, "[deadpool] replicas go by ")
        gate.unlink()

    alone = ["--nodes", "3", "--ranks-per-node", "1", "--spare-nodes", "1"]
    job = run_job(
        alone, large, during=wait, script=GATED, drop=["--hidden-size", "--global-batch-size"]
    )
    job.check_clean()
    said = re.findall(
        r"replicas go by (?:tcp|mpi): tcp moves \S+ GB/s over lo \(127\.0\.0\.1\), mpi \S+ GB/s "
        r"\((?:MPICH|Open MPI) [0-9.]+ within this machine\), 19\.9 MB each",
        job.output,
    )
    assert len(said) == 1, job.output[-6000:]
    assert "the MPI world is gone" not in job.output
