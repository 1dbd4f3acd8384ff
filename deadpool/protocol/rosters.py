"""Rosters as differences: made by a leader, composed by those who know the base."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from deadpool.protocol.messages import Propose
from deadpool.protocol.types import (
    Member,
    MemberId,
    ProtocolError,
    Restart,
    Roster,
    Slot,
    succession,
)


def in_order(
    me: Member, base: Roster | None, alive: Mapping[MemberId, Member]
) -> tuple[Member, ...]:
    """The order of succession under `me`, as `compose` makes it from the differences to `base`."""
    known = base.members if base is not None else ()
    named = {x.member for x in known}
    stay = [x for x in known if x.member in alive]
    come = [x for x in alive.values() if x.member not in named]
    return succession(me, [*stay, *come])


def whole(roster: Roster, restart: Restart | None) -> Propose:
    return Propose(
        id=roster.id,
        leader=roster.members[0].member,
        base=None,
        added=roster.members,
        removed=(),
        slots=tuple((Slot(s), member) for s, member in enumerate(roster.slots)),
        restart=restart,
    )


def difference(roster: Roster, base: Roster, restart: Restart | None) -> Propose:
    """Its size is that of what changed."""
    old = {x.member for x in base.members}
    new = {x.member for x in roster.members}
    return dataclasses.replace(
        whole(roster, restart),
        base=base.id,
        added=tuple(x for x in roster.members if x.member not in old),
        removed=tuple(x.member for x in base.members if x.member not in new),
        slots=tuple(
            (Slot(s), member) for s, member in enumerate(roster.slots) if base.slots[s] != member
        ),
    )


def compose(message: Propose, known: Iterable[Roster]) -> Roster:
    """The proposed roster. Raises ProtocolError where its base is not among `known`."""
    base = next((r for r in known if r.id == message.base), None)
    if base is None and message.base is not None:
        raise ProtocolError(f"roster {message.base} is not known here")
    old = base.members if base is not None else ()
    removed = set(message.removed)
    members = [x for x in old if x.member not in removed] + list(message.added)
    members.sort(key=lambda x: x.member != message.leader)
    slots = dict(enumerate(base.slots)) if base is not None else {}
    slots.update(message.slots)
    return Roster(
        id=message.id, members=tuple(members), slots=tuple(slots[s] for s in sorted(slots))
    )
