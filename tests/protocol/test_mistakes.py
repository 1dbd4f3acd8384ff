"""The search and the simulation have teeth: mistakes that they must find, one at a time.

Not found, since they do no harm alone: a late Propose (rosters are only taken in order, and only
from the leader that is followed), RosterIs, RosterWanted, RegroupFailed and FirstStep (they can
only ask again, or tell a report), TrainerCrashed (the others' collectives fail, too, and they say
so).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from deadpool.protocol import ballot, guardian, leader
from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.ballot import Ballot
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.invariants import Violated
from deadpool.protocol.leader import Leader
from deadpool.protocol.types import MemberId, Phase, Roster, Standing
from deadpool.simulation.schedule import run_seed
from deadpool.simulation.search import search
from deadpool.simulation.world import Mistakes, World, small_grid
from tests.protocol.worlds import training_world, with_budget


def patched(*patches: Any) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for patch in patches:
        stack.enter_context(patch)
    return stack


def of_leader(kind: type, handler: Callable[..., Any]) -> contextlib.ExitStack:
    """handler, in every phase that does something with messages of this kind."""
    phases = [p for p in Phase if leader._TABLE[p].get(kind) not in (None, Leader._ignore)]
    return patched(*(mock.patch.dict(leader._TABLE[phase], {kind: handler}) for phase in phases))


def of_follower(kind: type, handler: Callable[..., Any]) -> contextlib.ExitStack:
    known = [s for s in Standing if kind in guardian._FROM_LEADER[s]]
    tables = (guardian._FROM_LEADER[standing] for standing in known)
    return patched(*(mock.patch.dict(table, {kind: handler}) for table in tables))


# Snapshots


def commits_when_the_first_has_staged(
    self: Leader, sender: MemberId, message: m.Staged
) -> list[Any]:
    members = list(self._slot_of) if message.epoch == self.epoch else []
    return [a for x in members for a in Leader._take_staged(self, x, message)]


def test_commits_before_staging_are_found() -> None:
    with (
        of_leader(m.Staged, commits_when_the_first_has_staged),
        pytest.raises(Violated, match="can be restored everywhere"),
    ):
        world = World(grid=small_grid(2), num_spare_nodes=1, last=2)
        search(with_budget(world, {"losses": 1}))


def test_a_single_buffer_is_found() -> None:
    with pytest.raises(Violated, match="can be restored everywhere"):
        search(training_world(last=2, mistakes=Mistakes(num_buffers=1), losses=1))


def test_steps_that_do_not_wait_for_the_commit_are_found() -> None:
    world = World(
        grid=small_grid(2),
        num_spare_nodes=1,
        last=3,
        mistakes=Mistakes(waits_for_commit=False),
    )
    with pytest.raises(Violated, match=r"are run again|can be restored everywhere"):
        search(with_budget(world, {"losses": 1}))


# Epochs: each check taken out alone, with one late message of the kind


def of_now(handler: Callable[..., Any]) -> Callable[..., Any]:
    """An upstream handler that takes its message for one of the leader's epoch."""

    def take(self: Leader, sender: MemberId, message: Any) -> Any:
        return handler(self, sender, dataclasses.replace(message, epoch=self.epoch))

    return take


def takes_any_acceptance(self: Leader, sender: MemberId, message: m.Accepted) -> Any:
    if self._roster is None:
        return []
    return Leader._take_accepted(self, sender, m.Accepted(roster=self._roster.id))


def enters_any_epoch(self: Guardian, message: m.Abort) -> Any:
    self.promised = min(self.promised, message.epoch - 1)
    return Guardian._enter_epoch(self, message)


def resumes_at_any_word(self: Guardian, message: m.Resume) -> Any:
    if self.plan is None or self.slot is None:
        return []
    self._install_up_to(self._rosters[-1])
    self.has_state = True
    actions: list[Any] = [e.ResumeTrainer(epoch=self.promised)]
    if self.plan.restart.restore is not None:
        actions.append(self._put(self.plan.restart.restore))
    return actions


def takes_any_commit(self: Guardian, message: m.Committed) -> Any:
    return Guardian._committed(self, dataclasses.replace(message, epoch=self.promised))


TWICE = {"losses": 1, "regroup_failures": 1}
THREE_SLOTS = {"losses": 1, "slots": 3, "last": 2}

EPOCH_CHECKS: list[Any] = [
    (m.Ready, of_leader, of_now(Leader._take_ready), TWICE, False, "are not ready"),
    (m.Aborted, of_leader, of_now(Leader._take_aborted), TWICE, False, "without promises of"),
    (
        m.Accepted,
        of_leader,
        takes_any_acceptance,
        {**TWICE, "spares": 3},
        True,
        "without a quorum of",
    ),
    (
        m.Staged,
        of_leader,
        of_now(Leader._take_staged),
        THREE_SLOTS,
        True,
        "can be restored everywhere",
    ),
    (m.Finished, of_leader, of_now(Leader._take_finished), THREE_SLOTS, True, "has done 1 alone"),
    (
        m.Abort,
        of_follower,
        enters_any_epoch,
        {"losses": 2, "spares": 2},
        True,
        "without promises of",
    ),
    (
        m.Resume,
        of_follower,
        resumes_at_any_word,
        {"losses": 2, "spares": 2},
        True,
        "no end can be reached",
    ),
    (
        m.Committed,
        of_follower,
        takes_any_commit,
        {"losses": 1, "last": 2},
        True,
        "can be restored everywhere",
    ),
]


@pytest.mark.parametrize(
    ("kind", "patch", "handler", "sizes", "at_once", "found"),
    EPOCH_CHECKS,
    ids=[check[0].__name__ for check in EPOCH_CHECKS],
)
def test_a_missing_check_of_an_epoch_is_found(
    kind: type,
    patch: Callable[..., contextlib.ExitStack],
    handler: Callable[..., Any],
    sizes: dict[str, int],
    at_once: bool,
    found: str,
) -> None:
    with patch(kind, handler):
        world = training_world(**sizes, late=1)
        world.late_kinds = kind
        with pytest.raises(Violated, match=found):
            search(world, at_once=at_once)


# Majorities


def test_minorities_that_lead_are_found() -> None:
    with (
        mock.patch.object(Roster, "is_quorum", lambda self, voters: True),
        mock.patch.object(ballot.Ballot, "is_passed", property(lambda self: True)),
        pytest.raises(Violated, match=r"2: |3: |4: |surviving members end"),
    ):
        search(training_world(suspicions=3), at_once=True)


_rosters = Guardian._rosters.fget  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("minded", "found"),
    [
        (slice(-1, None), "without promises of a quorum"),
        (slice(0, 1), "comes into force without a quorum"),
    ],
    ids=["newest", "oldest"],
)
def test_minding_one_of_several_rosters_is_found(minded: slice, found: str) -> None:
    """Which of those that may be in force is, nobody knows."""
    one = property(lambda self: _rosters(self)[minded])
    with mock.patch.object(Guardian, "_rosters", one), pytest.raises(Violated, match=found):
        search(training_world(losses=2, spares=2), at_once=True)


def voting_among(rosters_of: Callable[[Leader], list[Roster]]) -> contextlib.ExitStack:
    """Acceptances of a new roster are asked of these alone."""

    def wrapped(name: str) -> Any:
        original = getattr(Leader, name)

        def run(self: Leader, *args: Any) -> Any:
            actions = original(self, *args)
            if self._accepts is not None and not self._accepts.voters:
                self._accepts = Ballot(rosters_of(self))
            return actions

        return mock.patch.object(Leader, name, run)

    return patched(wrapped("_send_plan"), wrapped("_update_roster"))


def test_asking_the_new_roster_alone_is_found() -> None:
    with (
        voting_among(lambda leading: [leading._roster] if leading._roster else []),
        pytest.raises(Violated, match="comes into force without a quorum"),
    ):
        search(training_world(losses=2, spares=2), at_once=True)


def test_asking_the_old_roster_alone_is_found() -> None:
    """Only a roster that has grown by a node that came later can tell."""
    with (
        voting_among(lambda leading: list(leading.rosters.values())),
        pytest.raises(Violated, match="comes into force without a quorum"),
    ):
        for seed in range(100):
            run_seed(seed)


# Trainers that die


def test_a_new_trainer_that_does_not_hear_of_the_epoch_is_found() -> None:
    """The dead one had been told of it; only the guardian knows that."""
    respawn = Guardian._respawn

    def tells_nothing(self: Guardian, kind: str, reason: str) -> list[Any]:
        return [a for a in respawn(self, kind, reason) if not isinstance(a, e.AbortTrainer)]

    with mock.patch.object(Guardian, "_respawn", tells_nothing), pytest.raises(Violated):
        search(training_world(crashes=2, spares=0), allowed=lambda codes: codes == {0})
