"""Every order of events in a small world: the leader, two slots, spares, one small guardian each.

The guardians are a model of what `guardian.py`, `replication.py` and `integrations/megatron.py`
do with messages and memory: two buffers a slot and two a ward, a step that waits for the commit of
the iteration before it, replicas that are valid only when whole. The leader is the real one. Small
worlds are searched whole; larger ones are walked at random. Mistakes seeded into the world must be
found, else the search proves nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest

from deadpool.protocol import leader as p
from deadpool.protocol.leader import Leader
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Holdings, Iteration, Member, MemberId, Node, Phase, Plan, Slot

Move = tuple[Any, ...]

STANDBY, WAITS_PLAN, RESTORES, WAITS_RESUME, COMPUTES, REDUCED, CAPTURES, DONE = (
    "standby waits-plan restores waits-resume computes reduced captures done".split()
)
IN_LOOP = (COMPUTES, REDUCED, CAPTURES, DONE)


class Violated(Exception):
    """An invariant of the architecture does not hold in a reachable state."""


class HastyLeader(Leader):
    """Announces a commit when the first slot has staged."""

    def handle(self, event: p.Event) -> list[p.Action]:
        if isinstance(event, p.Staged) and event.epoch == self.epoch:
            for slot in self.slots:
                self._staged[slot] = event.iteration
        return super().handle(event)


class Guardian:
    """One guardian and its trainer."""

    __slots__ = (
        "buffers",
        "committed",
        "completed",
        "epoch",
        "plan",
        "puts",
        "shelf",
        "slot",
        "state",
        "trainer_epoch",
    )

    def __init__(self) -> None:
        self.epoch = 0
        self.trainer_epoch = 0
        self.state = STANDBY
        self.plan: Plan | None = None
        self.slot: int | None = None
        self.completed = -1
        self.buffers: tuple[int | None, ...] = (None, None)
        self.shelf: tuple[tuple[int, tuple[int | None, int | None]], ...] = ()
        self.puts: tuple[tuple[int, bool], ...] = ()
        """(iteration, bytes are under way), in order."""
        self.committed = (0, -1)

    def copy(self) -> Guardian:
        twin = object.__new__(Guardian)
        for name in Guardian.__slots__:
            setattr(twin, name, getattr(self, name))
        return twin

    def key(self) -> Hashable:
        plan = self.plan.epoch if self.plan else 0
        return plan, *(getattr(self, n) for n in Guardian.__slots__ if n != "plan")

    # The shelf of replicas, as `ReplicaShelf`

    def held(self, slot: int) -> tuple[int | None, int | None]:
        return dict(self.shelf).get(slot, (None, None))

    def _set_held(self, slot: int, pair: tuple[int | None, int | None]) -> None:
        self.shelf = tuple(sorted({**dict(self.shelf), slot: pair}.items()))

    def open_buffer(self, slot: int) -> None:
        pair = sorted(self.held(slot), key=lambda i: -1 if i is None else i)
        self._set_held(slot, (None, pair[1]))

    def label(self, slot: int, iteration: int) -> None:
        _, newest = self.held(slot)
        self._set_held(slot, (iteration, newest))

    def invalidate_after(self, iteration: int) -> None:
        def keep(i: int | None) -> int | None:
            return None if i is not None and i > iteration else i

        self.buffers = tuple(map(keep, self.buffers))
        self.shelf = tuple((slot, (keep(a), keep(b))) for slot, (a, b) in self.shelf)

    def holdings(self) -> Holdings:
        return Holdings(
            own=frozenset(Iteration(i) for i in self.buffers if i is not None),
            replicas=frozenset(
                (Slot(slot), Iteration(i))
                for slot, pair in self.shelf
                for i in pair
                if i is not None
            ),
        )


class World:
    """The leader, its guardians, and what is under way between them."""

    def __init__(
        self,
        *,
        num_spares: int,
        num_losses: int,
        last: int,
        num_regroup_failures: int = 0,
        leader: type[Leader] = Leader,
        num_buffers: int = 2,
        waits_for_commit: bool = True,
    ) -> None:
        grid = Grid(
            world_size=2,
            ranks_per_node=1,
            tensor=1,
            context=1,
            pipeline=1,
            pipeline_before_data=False,
        )
        self.last = last
        self.num_buffers = num_buffers
        self.waits_for_commit = waits_for_commit
        self.losses_left = num_losses
        self.regroup_failures_left = num_regroup_failures
        self.highest = -1
        """The most iterations any trainer has ever completed."""
        self.exit_code: int | None = None
        """What the leader ended the job with."""
        self.leader = leader(grid=grid, num_spare_nodes=num_spares)
        self.guardians: dict[int, Guardian] = {}
        self.to_leader: dict[int, tuple[Any, ...]] = {}
        self.from_leader: dict[int, tuple[Any, ...]] = {}
        for number in range(2 + num_spares):
            self.guardians[number] = Guardian()
            self.to_leader[number] = self.from_leader[number] = ()
        for number in range(2 + num_spares):
            member = Member(
                member=MemberId(number), node=Node(number), local_rank=0, host="", data_port=0
            )
            self._feed(p.Joined(member=member))

    def copy(self) -> World:
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.leader = object.__new__(type(self.leader))
        for name, value in self.leader.__dict__.items():
            mutable = isinstance(value, dict | set | list)
            setattr(twin.leader, name, value.copy() if mutable else value)
        twin.guardians = {n: g.copy() for n, g in self.guardians.items()}
        twin.to_leader = dict(self.to_leader)
        twin.from_leader = dict(self.from_leader)
        return twin

    def key(self) -> Hashable:
        leader = self.leader
        return (
            leader.phase,
            leader.epoch,
            tuple(sorted(leader.slots.items())),
            tuple(leader.members),
            leader.committed,
            leader._committed_in_epoch,
            tuple(sorted(leader._staged.items())),
            tuple(leader._aborted.items()),
            frozenset(leader._ready),
            frozenset(leader._finished),
            frozenset(leader._state_of),
            leader._num_failed_regroups,
            leader.plan.epoch if leader.plan else 0,
            self.losses_left,
            self.regroup_failures_left,
            self.highest,
            self.exit_code,
            tuple((n, g.key()) for n, g in self.guardians.items()),
            tuple(sorted(self.to_leader.items())),
            tuple(sorted(self.from_leader.items())),
        )

    # Moves

    def moves(self) -> Iterator[Move]:
        """Everything that can happen next."""
        for number, queue in self.to_leader.items():
            if queue:
                yield ("leader takes", number)
        for number, guardian in self.guardians.items():
            if self.from_leader[number]:
                yield ("guardian takes", number)
            yield from self._trainer_moves(number, guardian)
            if guardian.puts:
                yield from self._put_moves(number, guardian)
            if self.losses_left and not self.leader.is_over:
                yield ("node lost", number)

    def _trainer_moves(self, number: int, g: Guardian) -> Iterator[Move]:
        if g.state is CAPTURES:
            yield ("seals", number)
        if g.epoch > g.trainer_epoch:
            yield ("acknowledges", number)
            return
        if g.state is RESTORES and self._can_regroup(g):
            yield ("restores", number)
            if self.regroup_failures_left:
                yield ("regroup fails", number)
        elif g.state is COMPUTES and self._all_reach(g):
            yield ("reduces", number)
        elif g.state is REDUCED and (
            not self.waits_for_commit or g.committed >= (g.epoch, g.completed)
        ):
            yield ("steps", number)

    def _can_regroup(self, g: Guardian) -> bool:
        """Everybody of the plan stands in its epoch: the groups come up."""
        assert g.plan is not None
        peers = [self.guardians.get(m.member) for m in g.plan.slots]
        return all(
            peer is not None
            and peer.trainer_epoch == g.epoch
            and peer.state in (RESTORES, WAITS_RESUME)
            for peer in peers
        )

    def _all_reach(self, g: Guardian) -> bool:
        """The gradient reduction of the next iteration: every slot has entered it."""
        assert g.plan is not None
        peers = [self.guardians.get(m.member) for m in g.plan.slots]
        return all(
            peer is not None
            and peer.trainer_epoch == peer.epoch == g.epoch
            and peer.state in IN_LOOP
            and peer.completed >= g.completed
            for peer in peers
        )

    def _put_moves(self, number: int, g: Guardian) -> Iterator[Move]:
        assert g.plan is not None and g.slot is not None
        holder = self.guardians.get(g.plan.slots[g.plan.holders[g.slot]].member)
        if holder is None:
            return  # The owner tries until the epoch ends.
        _, under_way = g.puts[0]
        if under_way:
            yield ("put ends", number)
        elif holder.epoch == g.epoch:
            yield ("put begins", number)

    def apply(self, move: Move) -> None:
        name, number = move
        getattr(self, "_" + name.replace(" ", "_"))(number)

    def _leader_takes(self, number: int) -> None:
        event, *rest = self.to_leader[number]
        self.to_leader[number] = tuple(rest)
        if isinstance(event, p.Lost) and number not in self.guardians:
            del self.to_leader[number]
        self._feed(event)

    def _feed(self, event: p.Event) -> None:
        for action in self.leader.handle(event):
            if isinstance(action, p.SendAbort | p.SendPlan | p.SendResume | p.SendCommitted):
                for member in action.members:
                    self._send(member, action)
            elif isinstance(action, p.SendEnd):
                self.exit_code = action.exit_code
                for member in action.members:
                    self._send(member, action)

    def _send(self, member: int, action: p.Action) -> None:
        if member in self.guardians:
            self.from_leader[member] += (action,)

    def _tell(self, number: int, event: p.Event) -> None:
        self.to_leader[number] += (event,)

    def _node_lost(self, number: int) -> None:
        """What it had sent still arrives; then its connection ends."""
        self.losses_left -= 1
        del self.guardians[number]
        del self.from_leader[number]
        self._tell(number, p.Lost(member=MemberId(number), reason="lost"))

    def _guardian_takes(self, number: int) -> None:
        g = self.guardians[number]
        action, *rest = self.from_leader[number]
        self.from_leader[number] = tuple(rest)
        match action:
            case p.SendAbort():
                g.epoch, g.puts = action.epoch, ()
            case p.SendPlan() if action.plan.epoch == g.epoch:
                g.plan = action.plan
                g.slot = next(
                    s for s, m in enumerate(action.plan.slots) if m.member == MemberId(number)
                )
                if action.plan.restore is not None:
                    g.invalidate_after(action.plan.restore)
                g.state = RESTORES
            case p.SendResume() if action.epoch == g.trainer_epoch:
                g.state = COMPUTES if g.completed < self.last else DONE
                if g.plan is not None and g.plan.restore is not None:
                    g.puts += ((g.plan.restore, False),)
                if g.state is DONE:
                    self._finish(number)
            case p.SendCommitted():
                g.committed = (action.epoch, action.iteration)
            case p.SendEnd():
                g.state, g.puts = STANDBY, ()
                g.trainer_epoch = g.epoch

    def _finish(self, number: int) -> None:
        epoch = self.guardians[number].trainer_epoch
        self._tell(number, p.Finished(member=MemberId(number), epoch=epoch))

    def _acknowledges(self, number: int) -> None:
        """The trainer stands outside its collectives; a capture that was cut stays invalid."""
        g = self.guardians[number]
        g.trainer_epoch, g.state = g.epoch, WAITS_PLAN
        event = p.Aborted(
            member=MemberId(number), epoch=g.epoch, store_port=1, holdings=g.holdings()
        )
        self._tell(number, event)

    def _restores(self, number: int) -> None:
        g = self.guardians[number]
        assert g.plan is not None and g.slot is not None
        restore = g.plan.restore
        if restore is None:
            g.buffers, g.completed = (0, None), 0
            g.puts += ((0, False),)
        else:
            if restore not in g.buffers:
                source = self.guardians.get(dict(g.plan.sources)[Slot(g.slot)])
                if source is None:
                    return  # Its loss ends the epoch.
                if restore not in source.held(g.slot):
                    raise Violated(f"slot {g.slot} is sent to a member without its replica")
                buffers = list(g.buffers)
                buffers[restore % self.num_buffers] = restore
                g.buffers = tuple(buffers)
            if self.highest - restore > 1:
                raise Violated(f"iterations {restore + 1} to {self.highest} are run again")
            g.completed = restore
        self.highest = max(self.highest, g.completed)
        g.state = WAITS_RESUME
        self._tell(number, p.Ready(member=MemberId(number), epoch=g.epoch))

    def _regroup_fails(self, number: int) -> None:
        g = self.guardians[number]
        self.regroup_failures_left -= 1
        g.state = WAITS_PLAN
        self._tell(
            number, p.RegroupFailed(member=MemberId(number), epoch=g.epoch, reason="no route")
        )

    def _reduces(self, number: int) -> None:
        self.guardians[number].state = REDUCED

    def _steps(self, number: int) -> None:
        """The optimizer's step, and the beginning of its capture."""
        g = self.guardians[number]
        g.completed += 1
        self.highest = max(self.highest, g.completed)
        buffers = list(g.buffers)
        buffers[g.completed % self.num_buffers] = None
        g.buffers = tuple(buffers)
        g.state = CAPTURES

    def _seals(self, number: int) -> None:
        g = self.guardians[number]
        buffers = list(g.buffers)
        buffers[g.completed % self.num_buffers] = g.completed
        g.buffers = tuple(buffers)
        g.state = COMPUTES if g.completed < self.last else DONE
        if g.epoch == g.trainer_epoch:
            g.puts += ((g.completed, False),)
        if g.state is DONE:
            self._finish(number)

    def _put_begins(self, number: int) -> None:
        g = self.guardians[number]
        assert g.plan is not None and g.slot is not None
        holder = self.guardians[g.plan.slots[g.plan.holders[g.slot]].member]
        (iteration, _), *rest = g.puts
        if iteration in holder.held(g.slot):
            g.puts = tuple(rest)
            self._staged(number, iteration)
            return
        holder.open_buffer(g.slot)
        g.puts = ((iteration, True), *rest)

    def _put_ends(self, number: int) -> None:
        g = self.guardians[number]
        assert g.plan is not None and g.slot is not None
        holder = self.guardians[g.plan.slots[g.plan.holders[g.slot]].member]
        (iteration, _), *rest = g.puts
        if holder.epoch != g.epoch:
            g.puts = ((iteration, False), *rest)
            return
        holder.label(g.slot, iteration)
        g.puts = tuple(rest)
        self._staged(number, iteration)

    def _staged(self, number: int, iteration: int) -> None:
        g = self.guardians[number]
        self._tell(
            number,
            p.Staged(member=MemberId(number), epoch=g.epoch, iteration=Iteration(iteration)),
        )

    # Invariants

    def check(self) -> None:
        leader = self.leader
        if len(set(leader.slots.values())) != len(leader.slots):
            raise Violated("two slots are held by one member")
        self._check_agreement()
        if leader.phase is Phase.TRAINING and leader._committed_in_epoch is not None:
            self._check_completeness(leader._committed_in_epoch)

    def _check_agreement(self) -> None:
        plans: dict[int, Plan] = {}
        holders: dict[tuple[int, int], int] = {}
        for number, g in self.guardians.items():
            if g.plan is None:
                continue
            if plans.setdefault(g.plan.epoch, g.plan) != g.plan:
                raise Violated(f"two plans of epoch {g.plan.epoch}")
            assert g.slot is not None
            if holders.setdefault((g.plan.epoch, g.slot), number) != number:
                raise Violated(f"slot {g.slot} is held twice in epoch {g.plan.epoch}")

    def _check_completeness(self, committed: int) -> None:
        """After the loss of any one node, every slot can be restored to an iteration not older
        than the committed one, unless a loss is under way that the leader has not heard of."""
        members = list(self.leader.slots.values())
        if any(member not in self.guardians for member in members):
            return
        for lost in members:
            alive = {n: g for n, g in self.guardians.items() if n != lost}
            if not any(
                all(self._restorable(alive, slot, iteration) for slot in self.leader.slots)
                for iteration in range(committed, self.highest + 1)
            ):
                raise Violated(
                    f"{committed} is committed, and without member {lost} no iteration from it on "
                    "can be restored everywhere"
                )

    def _restorable(self, alive: dict[int, Guardian], slot: Slot, iteration: int) -> bool:
        owner = self.leader.slots[slot]
        if owner in alive and iteration in alive[owner].buffers:
            return True
        return any(iteration in g.held(slot) for g in alive.values())


def check_end(world: World) -> int:
    """Its exit code. Every execution ends the job, and none needs a deadline for it."""
    if not world.leader.is_over:
        raise Violated(f"nothing can happen in {world.leader.phase.value}, only a deadline")
    assert world.exit_code is not None
    return world.exit_code


def search(make: Callable[[], World], *, most: int = 400_000) -> tuple[int, set[int]]:
    """Breadth first through every order of moves; (number of states, exit codes).

    Raises Violated with the shortest way there."""
    first = make()
    seen = {first.key()}
    frontier: deque[tuple[World, Any]] = deque([(first, None)])
    ends: set[int] = set()
    while frontier:
        world, way = frontier.popleft()
        moves = list(world.moves())
        try:
            if not moves:
                ends.add(check_end(world))
            for move in moves:
                following = world.copy()
                here = (move, way)
                following.apply(move)
                following.check()
                key = following.key()
                if key not in seen:
                    seen.add(key)
                    frontier.append((following, here))
        except Violated as error:
            raise Violated(f"{error}; after {_told(locals().get('here', way))}") from None
        assert len(seen) <= most, "the world is too large to be searched whole"
    return len(seen), ends


def _told(way: Any) -> str:
    steps = []
    while way is not None:
        move, way = way
        steps.append(" ".join(map(str, move)))
    return ", ".join(reversed(steps))


def walk(world: World, seed: int) -> int:
    """One random order of moves to its end."""
    chooser = random.Random(seed)
    way: Any = None
    while True:
        moves = list(world.moves())
        try:
            if not moves:
                return check_end(world)
            # Losses are rare, so that they fall on all moments alike.
            quiet = [move for move in moves if move[0] != "node lost"]
            loses = not quiet or (len(quiet) < len(moves) and chooser.random() < 0.03)
            move = chooser.choice(moves if loses else quiet)
            way = (move, way)
            world.apply(move)
            world.check()
        except Violated as error:
            raise Violated(f"seed {seed}: {error}; after {_told(way)}") from None


LOST_BEFORE_FIRST_SNAPSHOT = 1
NO_SPARE_LEFT = 3
NO_COPY_LEFT = 4


def test_search_without_losses_completes_in_every_order() -> None:
    _, ends = search(lambda: World(num_spares=1, num_losses=0, last=3))
    assert ends == {0}


def test_search_one_loss_at_any_moment_completes_or_comes_before_the_first_snapshot() -> None:
    num_states, ends = search(lambda: World(num_spares=1, num_losses=1, last=2))
    assert ends == {0, LOST_BEFORE_FIRST_SNAPSHOT}
    assert num_states > 10_000


@pytest.mark.parametrize("num_spares", [1, 2, 3])
def test_walks_with_losses_close_together_hold_the_invariants(num_spares: int) -> None:
    ends = {
        walk(
            World(
                num_spares=num_spares,
                num_losses=num_spares,
                last=4,
                num_regroup_failures=num_spares,
            ),
            seed,
        )
        for seed in range(1_000)
    }
    assert 0 in ends
    assert ends <= {0, LOST_BEFORE_FIRST_SNAPSHOT, NO_SPARE_LEFT, NO_COPY_LEFT}


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ({"leader": HastyLeader}, "can be restored|without its replica|run again"),
        ({"num_buffers": 1}, "can be restored|run again"),
        ({"waits_for_commit": False}, "can be restored|run again"),
    ],
    ids=["commit-announced-early", "one-buffer", "step-does-not-wait"],
)
def test_search_with_a_seeded_mistake_finds_it(mistake: dict[str, Any], found: str) -> None:
    with pytest.raises(Violated, match=found):
        search(lambda: World(num_spares=1, num_losses=1, last=2, **mistake))
