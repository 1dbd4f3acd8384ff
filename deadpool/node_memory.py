"""What host memory a node has left, and whether the snapshots fit.

MemAvailable, the limits of the control groups that this process is in (v1 and v2, each up to the
root), and the limit of a file's size, which a memfd obeys too. A memfd is on no mounted tmpfs:
neither /dev/shm nor its size limits it, but its pages count as the control group's memory. The
limit of locked memory (ulimit -l) is not compared: the NVIDIA driver pins by itself.
"""

from __future__ import annotations

import dataclasses
import posixpath
import resource
from collections.abc import Callable, Sequence

from deadpool.budget import NodeNeed, arena_bytes
from deadpool.protocol.placement import Grid
from deadpool.protocol.snapshots import NUM_BUFFERS

RESERVE_BYTES = 256 << 20
"""Of each rank, for what its processes take beside snapshots after the check: gloo's buffers,
data loaders. On CPUs the training itself is not in it. Chosen, not measured."""

RESERVE_BYTES_CUDA = 2 << 30
"""The same with a GPU: CUDA's context and NCCL's buffers too."""

_UNLIMITED = 1 << 60
"""Control groups v1 write a page below 2**63 where there is no limit."""

Read = Callable[[str], str | None]
"""The text of a file by its absolute path; None where it cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound of what may be allocated."""

    num_bytes: int
    """That are left below it; not negative."""
    name: str
    """In words, for the message of a refusal."""


def read_text(path: str) -> str | None:
    """A `Read` of the real files."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def available(read: Read) -> Limit | None:
    """MemAvailable of /proc/meminfo; None where the kernel does not say it."""
    for line in (read("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return Limit(num_bytes=int(value.split()[0]) * 1024, name="MemAvailable")
    return None


def control_group_limits(read: Read) -> list[Limit]:
    """Of every control group from this process's to the root that has a limit of memory.

    Left are the limit less the usage, with the page cache that the kernel gives back
    (inactive_file) added again. Inside a container the path may be the host's: where it is not
    there, the mount's root is this process's group.
    """
    limits = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found = _limits_up(read, "/sys/fs/cgroup", path, _V2)
            limits += found or _limits_up(read, "/sys/fs/cgroup/unified", path, _V2)
        elif "memory" in controllers.split(","):
            limits += _limits_up(read, "/sys/fs/cgroup/memory", path, _V1)
    return limits


@dataclasses.dataclass(frozen=True, slots=True)
class _Version:
    limit: str
    usage: str
    reclaimable: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("memory.max", "memory.current", "inactive_file")


def _limits_up(read: Read, mount: str, path: str, version: _Version) -> list[Limit]:
    limits = []
    path = posixpath.normpath(path)
    while True:
        folder = posixpath.join(mount, path.lstrip("/")).rstrip("/")
        limit, usage = (read(f"{folder}/{name}") for name in (version.limit, version.usage))
        if limit is not None and usage is not None and limit.strip() != "max":
            bound = int(limit)
            if bound < _UNLIMITED:
                stat = dict(
                    line.split()[:2] for line in (read(f"{folder}/memory.stat") or "").splitlines()
                )
                left = bound - int(usage) + int(stat.get(version.reclaimable, 0))
                limits.append(
                    Limit(num_bytes=max(0, left), name=f"{folder}/{version.limit} less its usage")
                )
        if path in ("/", ".", ""):
            return limits
        path = posixpath.dirname(path)


def tightest(read: Read) -> Limit | None:
    """The smallest of all bounds on a node's memory; None where nothing says any."""
    first = available(read)
    limits = ([] if first is None else [first]) + control_group_limits(read)
    return min(limits, key=lambda limit: limit.num_bytes, default=None)


def file_size_limit() -> Limit | None:
    """RLIMIT_FSIZE of this process, which bounds each slot's memfd; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else Limit(num_bytes=soft, name="ulimit -f")


def refusal(
    grid: Grid,
    needs: Sequence[NodeNeed],
    sizes: Sequence[int],
    *,
    num_nodes_here: int,
    memory: Limit | None,
    file_size: Limit | None,
    is_distributed: bool,
) -> str | None:
    """Why the snapshots do not fit on this machine, and what to change; None where they fit.

    sizes: payload bytes by slot. num_nodes_here: how many of the job's nodes this machine bears;
    spares count as the places that they may take.
    """
    largest = max(sizes)
    if file_size is not None and arena_bytes(largest) > file_size.num_bytes:
        return (
            f"a snapshot is up to {show_bytes(largest)} a slot, {NUM_BUFFERS} in one memory file; "
            f"{file_size.name} allows files of {show_bytes(file_size.num_bytes)}: raise it"
        )
    chosen = sorted(needs, key=lambda need: need.num_bytes, reverse=True)[:num_nodes_here]
    total = sum(need.num_bytes for need in chosen)
    if memory is None or total <= memory.num_bytes:
        return None
    num_held = sum(len(need.held) for need in chosen)
    where = "a node needs" if len(chosen) == 1 else f"{len(chosen)} nodes on this machine need"
    parts = (
        f"{sum(len(need.slots) for need in chosen)} slots x {NUM_BUFFERS} buffers = "
        f"{show_bytes(sum(need.own_bytes for need in chosen))}, {num_held} replicas x "
        f"{NUM_BUFFERS} buffers = {show_bytes(sum(need.replica_bytes for need in chosen))}, "
        f"reserve {show_bytes(sum(need.reserve_bytes for need in chosen))}"
    )
    return (
        f"the snapshots do not fit in host memory: a slot's is up to {show_bytes(largest)}; "
        f"{where} {show_bytes(total)} ({parts}), and {show_bytes(memory.num_bytes)} are left "
        f"({memory.name}). {_advice(grid, is_distributed, len(chosen) > 1)}"
    )


def _advice(grid: Grid, is_distributed: bool, shares_machine: bool) -> str:
    ways = []
    if not is_distributed and grid.data * grid.context > 1:
        ways.append(
            "--use-distributed-optimizer, which cuts a snapshot to about 1/"
            f"{grid.data * grid.context}"
        )
    elif is_distributed:
        ways.append("more nodes, for more data-parallel shards")
    else:
        ways.append("more nodes, with --use-distributed-optimizer")
    if grid.ranks_per_node > 1:
        ways.append(f"fewer ranks a node than {grid.ranks_per_node}")
    ways.append("a machine with more memory" if shares_machine else "nodes with more memory")
    return f"Give {'; or '.join(ways)}"


def show_bytes(num_bytes: int) -> str:
    """As GiB with two digits behind the point, smaller ones as MiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"
