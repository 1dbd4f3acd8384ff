"""Process groups whose engine can be swapped while every holder keeps the object.

Megatron, DDP buckets, optimizers and the pipeline hold `ProcessGroup` objects. Ranks, sizes and
membership of a group never change in a job, so the objects stay; only the c10d `Backend` inside
each is replaced. Groups are first made with a placeholder backend, which needs no rendezvous;
the real backends are built per epoch. Start-up is repair number 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from deadpool import blocked_work
from deadpool.native import native_pointer, torch_function
from deadpool.sockets import ConnectionSet

logger = logging.getLogger(__name__)

_RELEASE_RESOURCES = "_ZN4c10d12ProcessGroup17release_resourcesEv"

_RELEASE_AFTER_S = 0.03
"""How long a wait may outlast the cut that should have ended it."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """One process group this rank is a member of."""

    group: dist.ProcessGroup
    name: str
    ranks: tuple[int, ...]
    """Global ranks, in group order."""
    backend_name: str
    """What the caller of `new_group` asked for: gloo or nccl."""
    timeout: timedelta
    options: Any = None
    backend: Any = None
    """The live c10d Backend; None while only the placeholder is installed."""


class BuildSuperseded(Exception):
    """A newer epoch was announced while the groups of this one were being built."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"epoch {epoch} was superseded while its groups were built")


class _Build:
    """The building of one epoch's backends, shared by its thread and the one that waits."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.settled = threading.Event()
        """Set when the thread has ended, or nobody waits for it any more."""
        self.error: Exception | None = None
        self.backends: list[Any] = []
        self.store: dist.TCPStore | None = None
        self.device: Any = None


class GroupRegistry:
    """Every group of this process, in creation order (the same on every member).

    `recording()` wraps group creation. `build` and `destroy` belong to the main thread; `abort`
    may be called by any thread at any moment.
    """

    def __init__(self) -> None:
        self.records: list[GroupRecord] = []
        self._lock = threading.Lock()
        self._aborted_through = 0
        self._building: _Build | None = None
        self._builders: list[threading.Thread] = []
        self._connections: ConnectionSet | None = None
        self._store: dist.Store | None = None
        self._device: Any = None
        self._retired: list[threading.Thread] = []
        self._left_through = 0
        self._releasers: list[threading.Thread] = []
        self._is_shut_down = threading.Event()
        blocked_work.watch_waits()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, `init_process_group` and `new_group` make placeholder groups and are recorded.

        A placeholder's collectives return at once without moving data, so model construction
        on a lone replacement process meets no peer.
        """
        # Importing this module registers torch's "fake" backend.
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        original = c10d._new_process_group_helper

        def make_placeholder(
            group_size: int,
            group_rank: int,
            global_ranks_in_group: list[int],
            backend: str,
            store: dist.Store,
            group_name: str,
            backend_options: Any = None,
            timeout: timedelta | None = None,
            **kwargs: Any,
        ) -> Any:
            kwargs.pop("device_id", None)
            made = original(
                group_size,
                group_rank,
                global_ranks_in_group,
                c10d.Backend("fake"),
                store,
                group_name,
                timeout=timeout,
                **kwargs,
            )
            if made[0] is not c10d.GroupMember.NON_GROUP_MEMBER:
                # `new_group` without a backend takes the default group's, from this map.
                c10d._world.pg_map[made[0]] = (c10d.Backend(backend), made[1])
                ranks = tuple(global_ranks_in_group) or tuple(range(group_size))
                self.records.append(
                    GroupRecord(
                        group=made[0],
                        name=str(group_name),
                        ranks=ranks,
                        backend_name=str(backend),
                        timeout=timeout or c10d.default_pg_timeout,
                        options=backend_options,
                    )
                )
            return made

        c10d._new_process_group_helper = make_placeholder
        try:
            yield
        finally:
            c10d._new_process_group_helper = original

    def build(
        self,
        *,
        epoch: int,
        connect_store: Callable[[], dist.TCPStore],
        hostname: str,
        build_timeout_s: float,
    ) -> None:
        """Build and install a real backend in every group. All members call it for one epoch.

        connect_store: returns the rendezvous store of this epoch alone. hostname: address on
        which gloo listens. Raises BuildSuperseded when `abort` was called for this epoch
        meanwhile, RuntimeError when a member does not come within `build_timeout_s`.

        A gloo constructor that waits for a peer that died meanwhile cannot be interrupted and
        has the group's own timeout, often minutes. So a thread builds, and is left behind when
        its epoch is: it ends by itself, and holds nothing of later epochs.
        """
        job = _Build(epoch)
        with self._lock:
            if epoch <= self._aborted_through:
                raise BuildSuperseded(epoch)
            self._building = job
            self._connections = ConnectionSet()
        thread = threading.Thread(
            target=self._build_all,
            args=(job, connect_store, hostname),
            name=f"deadpool-build-{epoch}",
            daemon=True,
        )
        thread.start()
        self._builders = [t for t in self._builders if t.is_alive()] + [thread]
        if not job.settled.wait(build_timeout_s):
            self.abort(epoch)
            raise RuntimeError(
                f"the process groups of epoch {epoch} were not built within {build_timeout_s:g} s"
            )
        with self._lock:
            if epoch <= self._aborted_through:
                raise BuildSuperseded(epoch)
            if job.error is not None:
                raise job.error
            assert self._connections is not None and job.store is not None
            self._connections.freeze(except_port=job.store.port)
        retired = [record.backend for record in self.records if record.backend is not None]
        kept_until_then = [self._store, self._device]
        for record, backend in zip(self.records, job.backends, strict=True):
            record.backend = backend
            _install(record)
        self._store, self._device = job.store, job.device
        self._destroy_in_background(retired, kept_until_then)

    def _build_all(
        self, job: _Build, connect_store: Callable[[], dist.TCPStore], hostname: str
    ) -> None:
        try:
            job.store = connect_store()
            job.device = c10d.ProcessGroupGloo.create_device(hostname=hostname)
            for record in self.records:
                job.backends.append(self._make_backend(record, job))
        except Exception as error:  # The thread's outermost frame: `build` raises it.
            job.error = error
        job.settled.set()

    def _make_backend(self, record: GroupRecord, job: _Build) -> Any:
        prefix = dist.PrefixStore(f"epoch{job.epoch}/{record.name}/", job.store)
        rank = record.group.rank()
        if record.backend_name == "nccl":
            options = record.options or c10d.ProcessGroupNCCL.Options()
            options._timeout = record.timeout
            options.global_ranks_in_group = list(record.ranks)
            options.group_name = record.name
            backend = c10d.ProcessGroupNCCL(prefix, rank, len(record.ranks), options)
        elif record.backend_name == "gloo":
            options = c10d.ProcessGroupGloo._Options()
            options._devices = [job.device]
            options._timeout = record.timeout
            options._threads = 2
            options.global_ranks_in_group = list(record.ranks)
            options.group_name = record.name
            backend = c10d.ProcessGroupGloo(prefix, rank, len(record.ranks), options)
        else:
            raise ValueError(
                f"process group {record.name} asks for backend {record.backend_name!r}; "
                "DEADPOOL repairs gloo and nccl groups: give --distributed-backend gloo or nccl"
            )
        backend._set_sequence_number_for_group()
        return backend

    def abort(self, epoch: int) -> int:
        """Make every blocked collective of epochs up to `epoch` raise now; returns how many
        sockets and communicators were cut. Any thread; idempotent.

        gloo: nothing in torch 2.13 aborts a blocked operation, shutting down its sockets does.
        NCCL: `abort` on each backend, in parallel.
        """
        with self._lock:
            self._aborted_through = max(self._aborted_through, epoch)
            if self._building is not None:
                if self._building.epoch > epoch:
                    return 0
                self._building.settled.set()
            num_cut = self._connections.shutdown() if self._connections else 0
        threads = [
            threading.Thread(target=record.backend.abort, daemon=True)
            for record in self.records
            if record.backend is not None and record.backend_name == "nccl"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10.0)
        self._start_release(epoch)
        return num_cut + len(threads)

    def leave(self, epoch: int) -> None:
        """Main thread: it stands outside every operation of the epochs before `epoch`."""
        self._left_through = epoch - 1

    def _start_release(self, epoch: int) -> None:
        self._releasers = [t for t in self._releasers if t.is_alive()]
        thread = threading.Thread(
            target=self._release_blocked, args=(epoch,), name="deadpool-release", daemon=True
        )
        thread.start()
        self._releasers.append(thread)

    def _release_blocked(self, epoch: int) -> None:
        """Until the main thread has left: end the waits that the cut did not end."""
        lasting: dict[int, int] = {}
        while self._left_through < epoch and not self._is_shut_down.wait(_RELEASE_AFTER_S):
            now = blocked_work.waits()
            lasting = {t: work for t, work in now.items() if lasting.get(t) == work}
            if lasting:
                num_released = blocked_work.release(lasting)
                logger.info("epoch %d: released %d blocked operations", epoch, num_released)
            lasting = now

    def _destroy_in_background(self, backends: list[Any], kept_until_then: list[Any]) -> None:
        """Drop an earlier epoch's backends, and then what they used. Empties both lists.

        A backend's destructor joins its threads: milliseconds, but the group's timeout where one
        of them waits for a send that gloo forgot. It must not run where the interpreter lock is
        held, or everything here would stand still. So the last references are put into a group
        that nobody else holds, and that one is released by a foreign call.
        """
        self._retired = [thread for thread in self._retired if thread.is_alive()]
        if not backends:
            return
        grave = dist.ProcessGroup(dist.HashStore(), 0, 1)
        for number, backend in enumerate(backends):
            backend_type = dist.ProcessGroup.BackendType(_FIRST_FRESH_TYPE + number)
            grave._register_backend(torch.device("cpu"), backend_type, backend)
        del backend
        backends.clear()

        def destroy() -> None:
            if _release_resources(grave):
                kept_until_then.clear()

        thread = threading.Thread(target=destroy, name="deadpool-retire", daemon=True)
        thread.start()
        self._retired.append(thread)

    def join_retired(self, timeout_s: float = 10.0) -> bool:
        """Wait until backends of earlier epochs are gone. False: some are not."""
        deadline = time.monotonic() + timeout_s
        for thread in self._retired:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._retired)

    def shutdown(self) -> None:
        """Release everything at the end of the job. Where a backend of an earlier epoch still
        waits out its timeout, the end of this process releases it sooner."""
        self._is_shut_down.set()
        for thread in self._releasers:
            thread.join(10.0)
        if not self.join_retired(1.0):
            return
        self.records.clear()
        self._store = self._device = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _install(record: GroupRecord) -> None:
    """Put `record.backend` into the group object that everybody already holds."""
    group = record.group
    backend_type = c10d.Backend.backend_type_map[record.backend_name]
    if not _release_resources(group):
        backend_type = dist.ProcessGroup.BackendType(_fresh_type_value())
    for device in c10d.BackendConfig(c10d.Backend(record.backend_name)).get_device_backend_map():
        if device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), backend_type, record.backend)
    group._set_default_backend(backend_type)
    group._set_group_name(record.name)
    c10d._world.pg_map[group] = (record.backend_name, c10d._world.pg_map[group][1])
    config = c10d.BackendConfig(c10d.Backend(record.backend_name))
    c10d._world.pg_backend_config[group] = str(config)
    c10d._world.pg_coalesce_state.pop(group, None)


_FIRST_FRESH_TYPE = 100
"""Backend types from here on are not torch's own."""

_type_counter = iter(range(_FIRST_FRESH_TYPE, 1 << 30))


def _fresh_type_value() -> int:
    return next(_type_counter)


def _release_resources(group: dist.ProcessGroup) -> bool:
    """Drop the backends inside `group`. False where this torch offers no way: then the backends of
    past epochs stay allocated.

    `_register_backend` keeps a backend type that is set (torch 2.13); releasing first lets the
    real type be set again and drops the old backend.
    """
    release = torch_function(_RELEASE_RESOURCES, ctypes.c_void_p)
    if release is None:
        return False
    release(native_pointer(group))
    return True
