"""Cores as values: copies that share nothing mutable, and keys that equal states share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from typing import Any

from deadpool.protocol.ballot import Ballot
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.leader import Leader
from deadpool.protocol.snapshots import BufferLedger, ShelfLedger
from deadpool.protocol.types import Bounds, Member, Plan, Roster, Standing

_SHARED = frozenset({"_settings", "_grid", "_me", "me", "_holders"})


def copy_of(value: Any) -> Any:
    """Of a core or a part of it; what is frozen is shared."""
    if isinstance(value, dict):
        return value.copy()
    if isinstance(value, list | set):
        return value.copy()
    if isinstance(value, Guardian | Leader | BufferLedger | Ballot):
        twin = object.__new__(type(value))
        twin.__dict__.update(
            {
                name: each if name in _SHARED else copy_of(each)
                for name, each in value.__dict__.items()
            }
        )
        return twin
    if isinstance(value, ShelfLedger):
        shelf = ShelfLedger()
        shelf._slots = {slot: copy_of(ledger) for slot, ledger in value._slots.items()}
        return shelf
    return value


def key_of(value: Any) -> Hashable:
    """Equal for equal states. Members, rosters and plans are known by their names: that no two
    have one is checked elsewhere (`invariants.History`)."""
    if isinstance(value, Member):
        return value.member
    if isinstance(value, Roster):
        return value.id
    if isinstance(value, Plan):
        return ("plan", value.epoch)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, dict):
        return tuple((key_of(k), key_of(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(key_of, value), key=repr))
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    if isinstance(value, Ballot):
        return tuple(value._counts), key_of(value.voters)
    if isinstance(value, BufferLedger):
        return tuple(map(key_of, value._kept))
    if isinstance(value, ShelfLedger):
        return tuple(sorted((s, key_of(x)) for s, x in value._slots.items()))
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)]
        return (type(value).__name__, *(key_of(getattr(value, name)) for name in names))
    return value  # type: ignore[no-any-return]


def key_of_core(core: Guardian) -> Hashable:
    """Of a guardian's core: clocks count from what they are compared with, and stand still where
    nothing is."""
    bounds = core._settings.bounds
    skipped = _SHARED | {"leader", "_age", "_waited"}
    values: list[Hashable] = [
        key_of(value) for name, value in core.__dict__.items() if name not in skipped
    ]
    if core.standing is not Standing.LEFT:
        values.append(core._age)
    if core.standing in (Standing.JOINING, Standing.SEEKING):
        values.append(core._waited)
    values.append(_key_of_leader(core.leader, bounds) if core.leader is not None else None)
    return tuple(values)


def _key_of_leader(leader: Leader, bounds: Bounds) -> Hashable:
    skipped = _SHARED | {"_heard", "_now", "_entered"}
    values: list[Hashable] = [
        key_of(value) for name, value in leader.__dict__.items() if name not in skipped
    ]
    longest = max(bounds.recovery, bounds.start, bounds.leave, bounds.silence) + 1
    values.append(min(leader._now - leader._entered, longest))
    values.append(
        tuple(
            (member, min(leader._now - heard, bounds.silence + 1))
            for member, heard in leader._heard.items()
            if member in leader.members
        )
    )
    return tuple(values)
