"""Counting votes over several rosters at once, in constant time a vote."""

from __future__ import annotations

from collections.abc import Iterable

from deadpool.protocol.types import MemberId, Roster


class Ballot:
    """Passed when a quorum of every roster has voted: see `Roster.is_quorum`."""

    def __init__(self, rosters: Iterable[Roster]) -> None:
        self._rosters = [(r, frozenset(m.member for m in r.members)) for r in rosters]
        self._counts = [0] * len(self._rosters)
        self.voters: set[MemberId] = set()

    def add(self, voter: MemberId) -> None:
        if voter in self.voters:
            return
        self.voters.add(voter)
        for index, (_, members) in enumerate(self._rosters):
            self._counts[index] += voter in members

    @property
    def is_passed(self) -> bool:
        return all(
            2 * votes > len(roster.members)
            or (2 * votes == len(roster.members) and roster.members[0].member in self.voters)
            for (roster, _), votes in zip(self._rosters, self._counts, strict=True)
        )
