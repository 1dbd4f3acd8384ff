"""Cores as values: copies that share nothing mutable, and keys that equal states share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable
from typing import Any

from deadpool.protocol.ballot import Ballot
from deadpool.protocol.commits import Commits
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.leader import Leader
from deadpool.protocol.snapshots import BufferLedger, ShelfLedger
from deadpool.protocol.types import Bounds, Member, Plan, Roster

_SHARED = frozenset({"_settings", "_grid", "_me", "me", "_holders"})


def copy_of(value: Any) -> Any:
    """Of a core or a part of it; what is frozen is shared."""
    if isinstance(value, ShelfLedger):
        shelf = ShelfLedger(value._world_size)
        shelf._slots = {slot: copy_of(ledger) for slot, ledger in value._slots.items()}
        return shelf
    twin = object.__new__(type(value))
    twin.__dict__.update(value.__dict__)
    for name, each in value.__dict__.items():
        kind = type(each)
        if kind in (dict, set, list):
            twin.__dict__[name] = each.copy()
        elif kind in _PARTS:
            twin.__dict__[name] = copy_of(each)
    return twin


_PARTS = {Leader, BufferLedger, ShelfLedger, Ballot, Commits}


def key_of(value: Any) -> Hashable:
    """Equal for equal states. Members, rosters and plans are known by their names: that no two
    have one is checked elsewhere (`invariants.History`)."""
    kind = type(value)
    make = _KEYS.get(kind)
    if make is None:
        make = _KEYS[kind] = _make_key_function(kind)
    return make(value)


def _same(value: Any) -> Hashable:
    return value  # type: ignore[no-any-return]


def _of_dict(value: dict[Any, Any]) -> Hashable:
    """Without its order: that of a leader's members alone decides anything."""
    return frozenset([(k, key_of(v)) for k, v in value.items()])


def _of_sequence(value: Any) -> Hashable:
    return tuple(map(key_of, value))


_KEYS: dict[type, Callable[[Any], Hashable]] = {
    int: _same,
    str: _same,
    float: _same,
    bool: _same,
    type(None): _same,
    Member: lambda value: value.member,
    Roster: lambda value: value.id,
    Plan: lambda value: ("plan", value.epoch),
    dict: _of_dict,
    set: frozenset,
    frozenset: _same,
    list: _of_sequence,
    tuple: _of_sequence,
    Ballot: lambda value: (frozenset(r.id for r, _ in value._rosters), frozenset(value.voters)),
    Commits: lambda value: (_of_dict(value._staged), _of_dict(value._counts)),
    BufferLedger: lambda value: _of_sequence(value._kept),
    ShelfLedger: lambda value: tuple(sorted((s, key_of(x)) for s, x in value._slots.items())),
}


def _make_key_function(kind: type) -> Callable[[Any], Hashable]:
    if issubclass(kind, enum.Enum):
        return lambda value: value.name
    if issubclass(kind, tuple):
        return _of_sequence
    if dataclasses.is_dataclass(kind):
        names = [f.name for f in dataclasses.fields(kind)]
        title = kind.__name__
        return lambda value: (title, *(key_of(getattr(value, name)) for name in names))
    raise TypeError(f"{kind.__name__} in a core has no key")


def key_of_core(core: Guardian) -> Hashable:
    """Of a guardian's core: clocks count from what they are compared with, and stand still where
    nothing is."""
    values = [key_of(value) for name, value in core.__dict__.items() if name not in _OF_CORE]
    values.append(len(core._respawns))  # Their window is longer than what is searched.
    values += [core._age, core._waited, frozenset((x, core._patience[x]) for x in core._supporters)]
    if core.leader is not None:
        values += _keys_of_leader(core.leader, core._settings.bounds)
    return tuple(values)


_OF_CORE = _SHARED | {"leader", "_age", "_waited", "_patience", "_respawns"}
_OF_LEADER = _SHARED | {"members", "_heard", "_now", "_entered"}


def _keys_of_leader(leader: Leader, bounds: Bounds) -> list[Hashable]:
    values = [key_of(value) for name, value in leader.__dict__.items() if name not in _OF_LEADER]
    longest = max(bounds.recovery, bounds.start, bounds.leave, bounds.silence) + 1
    values.append(tuple(leader.members))
    values.append(min(leader._now - leader._entered, longest))
    values += [
        min(leader._now - leader._heard[member], bounds.silence + 1) for member in leader.members
    ]
    return values
