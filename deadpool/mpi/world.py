"""Who starts the MPI world of an epoch, and how: one mpiexec, or one Slurm job step."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import importlib.util
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from deadpool.mpi import frames as f
from deadpool.protocol.types import Member

_PACKAGES = str(Path(__file__).resolve().parents[2])
"""Where a new Python finds `deadpool`, installed or not."""

_STOP_TIMEOUT_S = 2.0
"""For a launcher to end its processes on all hosts, once told to."""

_TAIL_BYTES = 2000

INSTALL = "pip install mpi4py mpich"


class Kind(enum.Enum):
    """Whose a launcher is, by what `--version` says."""

    HYDRA = "MPICH and what derives from it"
    OPENMPI = "Open MPI"
    SLURM = "srun"
    OTHER = "takes -n alone"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """An MPI launcher's command, without what belongs to one world."""

    command: tuple[str, ...]


def find_launcher(given: str | None, environ: Mapping[str, str]) -> Launcher | str:
    """The launcher, or why there is none and what to type.

    given: --deadpool-mpi-launcher. Otherwise srun inside a Slurm job, else the mpiexec beside this
    Python, else the one in PATH.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed: {INSTALL}"
    if given is not None:
        command = tuple(shlex.split(given))
        if not command or shutil.which(command[0]) is None:
            return f"--deadpool-mpi-launcher {given}: there is no such program"
        return Launcher(command=command)
    if environ.get("SLURM_JOB_ID") and shutil.which("srun"):
        return Launcher(command=("srun",))
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        return (
            f"no mpiexec is found: {INSTALL}, load your machine's MPI module, or give "
            "--deadpool-mpi-launcher COMMAND"
        )
    return Launcher(command=(found,))


def kind_of(command: str, version: str) -> Kind:
    """version: what `command --version` printed."""
    if os.path.basename(command) == "srun":
        return Kind.SLURM
    if "HYDRA" in version:
        return Kind.HYDRA
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE")):
        return Kind.OPENMPI
    return Kind.OTHER


def host_list(slots: Sequence[Member]) -> str | None:
    """host:count in rank order; None where all are on one host, which then needs no remote start.

    A host that comes again later is listed again.
    """
    hosts = [member.host for member in slots]
    if len(set(hosts)) == 1:
        return None
    return ",".join(f"{host}:{len(list(group))}" for host, group in itertools.groupby(hosts))


def world_command(launcher: Launcher, kind: Kind, slots: Sequence[Member]) -> list[str]:
    """The whole command of a world with rank r on slot r's host. For SLURM the hosts are named by
    SLURM_HOSTFILE."""
    hosts = host_list(slots)
    more: list[str] = ["-n", str(len(slots))]
    if kind is Kind.HYDRA:
        more += ["-hosts", hosts] if hosts else []
    elif kind is Kind.OPENMPI:
        more += ["--oversubscribe", "--bind-to", "none", "-x", f.KEY_VARIABLE]
        more += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        more += ["--host", hosts] if hosts else []
    elif kind is Kind.SLURM:
        more += ["--overlap", "--distribution=arbitrary", "--input=none", "--kill-on-bad-exit=1"]
        more += ["--export=ALL"]
    sidecar = (sys.executable, "-m", "deadpool.mpi.sidecar", str(len(slots)))
    return [*launcher.command, *more, *sidecar]


_OF_THIS_PROCESS = ("DEADPOOL_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_")
"""Variables that are of this process: secrets of the job, or its own place in another world."""
_OPTIONS_OF_SRUN = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPU_BIND", "SLURM_DISTRIBUTION", "SLURM_MEM_",
    "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GRES", "SLURM_TRES",
)  # fmt: skip
"""The outer srun leaves them; an inner one would take them for its own options."""


def world_environ(
    environ: Mapping[str, str], kind: Kind, key: bytes, hostfile: str | None
) -> dict[str, str]:
    """What the launcher is started with."""
    dropped = _OF_THIS_PROCESS + (_OPTIONS_OF_SRUN if kind is Kind.SLURM else ())
    kept = {k: v for k, v in environ.items() if not k.startswith(dropped)}
    if kind is Kind.OPENMPI:
        kept |= {k: v for k, v in environ.items() if k.startswith("OMPI_MCA_")}
    if hostfile is not None:
        kept["SLURM_HOSTFILE"] = hostfile
    return {**kept, f.KEY_VARIABLE: key.hex()}


class World:
    """One MPI world; lives on the guardian's event loop."""

    def __init__(self, launcher: Launcher, slots: Sequence[Member], key: bytes) -> None:
        self._launcher = launcher
        self._slots = slots
        self._key = key
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """`run` ends it, and itself."""
        self._stopping.set()

    async def run(self) -> str:
        """From its start to its end; returns the end of what it printed. Cancelled, it kills.
        Raises OSError when it cannot be started."""
        loop = asyncio.get_running_loop()
        command = self._launcher.command[0]
        kind = kind_of(command, await loop.run_in_executor(None, _version, command))
        names = await loop.run_in_executor(None, _slurm_hosts, self._slots, kind)
        if self._stopping.is_set():
            return ""
        with _memory_file("hosts", names) as hosts, _memory_file("output", "") as output:
            hostfile = f"/proc/self/fd/{hosts.fileno()}" if names else None
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deadpool.mpi.tether", str(os.getpid())),
                *world_command(self._launcher, kind, self._slots),
                env=world_environ(os.environ, kind, self._key, hostfile),
                cwd=_PACKAGES,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(hosts.fileno(),),
            )
            try:
                await self._follow(process)
            finally:
                _signal(process, signal.SIGKILL)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return output.read().decode(errors="replace").strip()

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        ended = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _signal(process, signal.SIGTERM)
                await asyncio.wait([ended], timeout=_STOP_TIMEOUT_S)
        finally:
            for waiter in (ended, stopping):
                waiter.cancel()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        pass  # It has ended by itself.


def _memory_file(name: str, text: str) -> BinaryIO:
    """Nothing of it is left in a file system, however this process ends."""
    file = os.fdopen(os.memfd_create(f"deadpool-mpi-{name}"), "w+b")
    file.write(text.encode())
    file.flush()
    return file


def _version(command: str) -> str:
    """Never raises."""
    try:
        found = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
        return found.stdout + found.stderr
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _slurm_hosts(slots: Sequence[Member], kind: Kind) -> str:
    """Slurm's name of each slot's node, a line each; nothing for other launchers. Raises OSError
    where Slurm does not say."""
    if kind is not Kind.SLURM:
        return ""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        names = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.split()
        return "".join(names[member.node] + "\n" for member in slots)
    except (subprocess.SubprocessError, IndexError) as error:
        raise OSError(f"the hosts of {nodes} are not known: {error}") from error
