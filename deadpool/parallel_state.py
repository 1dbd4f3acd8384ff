"""Megatron's parallel state, extended: spares register, slots and epochs can be asked for, and the
process groups are rebuilt in place.

Everything of `megatron.core.parallel_state` is here too. The functions added belong to a trainer's
main thread; `attach` comes first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import *  # noqa: F403

from deadpool import messages as m
from deadpool.groups import GroupRegistry
from deadpool.link import EpochEnded, GuardianLink, JobEnded
from deadpool.protocol.types import Epoch, Iteration, Plan, Slot


@dataclasses.dataclass(slots=True)
class _State:
    link: GuardianLink
    registry: GroupRegistry
    host: str = ""
    """Address on which this trainer's groups and stores listen."""
    slot: Slot | None = None
    plan: Plan | None = None
    store: dist.TCPStore | None = None
    """The rendezvous store that this trainer opened for the coming epoch."""


_state: _State | None = None


def attach(link: GuardianLink, registry: GroupRegistry) -> None:
    """Connect this process's parallel state to its guardian."""
    global _state
    _state = _State(link, registry)


def _attached() -> _State:
    assert _state is not None, "deadpool.parallel_state.attach comes first"
    return _state


def register_spare() -> bool:
    """Tell the guardian that this process can take a slot, and wait for one.

    Every process begins as a spare. False: the job ended without needing this one.
    """
    state = _attached()
    state.link.send(m.TrainerUp())
    abort: m.EnterEpoch | None = None
    while True:
        try:
            abort = abort or state.link.wait_abort(None)
            assert abort is not None
            acknowledge(abort)
            abort = None
            adopt_plan()
            return True
        except EpochEnded:
            continue
        except JobEnded:
            return False


def is_spare() -> bool:
    """Whether this process has no slot."""
    return _attached().slot is None


def get_slot() -> Slot:
    """This process's slot, equal to its torch rank."""
    slot = _attached().slot
    assert slot is not None, "this process is a spare"
    return slot


def get_epoch() -> Epoch:
    """The membership version that this process works in."""
    return _attached().link.epoch


def get_plan() -> Plan:
    """Who holds which slot in this epoch."""
    plan = _attached().plan
    assert plan is not None, "this process is a spare"
    return plan


def get_neighbours() -> tuple[Slot, ...]:
    """The slots whose nodes' memories keep the replicas of this slot, the nearest first."""
    return get_plan().holders[get_slot()]


def create_groups(create: Callable[..., None], world_size: int) -> None:
    """Make all groups with placeholder backends: `create` is called with keywords for
    `torch.distributed.init_process_group`. No peer is needed."""
    state = _attached()
    with state.registry.recording():
        create(store=dist.HashStore(), rank=int(get_slot()), world_size=world_size)


def acknowledge(abort: m.EnterEpoch, live: Iteration | None = None) -> None:
    """Enter the announced epoch: this process stands outside every collective.

    live: the iteration whose state it holds and can take a snapshot of.
    """
    state = _attached()
    state.link.epoch, state.host = abort.epoch, abort.host
    state.registry.leave(abort.epoch)
    state.store = None
    if abort.opens_store:
        state.store = dist.TCPStore(state.host, 0, is_master=True, wait_for_workers=False)
    port = state.store.port if state.store is not None else 0
    state.link.send(m.TrainerAborted(epoch=abort.epoch, store_port=port, live=live))


def adopt_plan() -> Plan:
    """Wait for the plan of the entered epoch. Raises EpochEnded."""
    state = _attached()
    message = state.link.wait_plan()
    state.plan, state.slot = message.plan, message.slot
    return message.plan


def reconstruct_groups(build_timeout_s: float) -> None:
    """Replace the backend inside every group; every object that holds a group goes on holding the
    same one. All slots of the plan call it together.

    Raises EpochEnded or BuildSuperseded when a newer epoch was announced, RuntimeError when a
    member does not come within the bound.
    """
    state = _attached()
    plan = get_plan()
    own_store, state.store = state.store, None

    def connect_store() -> dist.TCPStore:
        if own_store is not None:
            return own_store
        host = plan.slots[plan.restart.store_slot].host
        timeout = timedelta(seconds=build_timeout_s)
        return dist.TCPStore(host, plan.restart.store_port, is_master=False, timeout=timeout)

    state.registry.build(
        epoch=plan.epoch,
        connect_store=connect_store,
        hostname=state.host,
        build_timeout_s=build_timeout_s,
    )


def destroy_groups() -> None:
    """At the end of the job, whose process ends next. gloo's backends are left to that: the
    destructor of one whose peer has left first can wait for its timeout, a minute or ten."""
    if dist.is_nccl_available() and torch.cuda.is_available():
        _attached().registry.shutdown()


def __getattr__(name: str) -> Any:
    # Names that `import *` leaves out: those that begin with an underscore.
    import megatron.core.parallel_state as base

    return getattr(base, name)
