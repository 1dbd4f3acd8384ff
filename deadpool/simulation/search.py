"""Every order of events of a small world, breadth first.

What makes it small, and why nothing is missed by it: clocks tick together and only when nothing
else can happen, except `suspicions_left` times, when one clock alone runs past its patience;
heartbeats have no other effect than to reset clocks, so they arrive with the tick that sent them.

Larger worlds are searched with `at_once`: trainers and replicas then move as soon as they can, one
after the other, and every order of the guardians' messages and faults around that is tried.
"""

from __future__ import annotations

import gc
from array import array
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Set
from typing import Any, NamedTuple

from deadpool.protocol import messages as m
from deadpool.protocol.invariants import Violated
from deadpool.protocol.types import MemberId
from deadpool.simulation.world import ENDED, GONE, World, epoch_of, keep_all, keep_none

Move = tuple[Any, ...]


def moves_of(world: World, *, at_once: bool = False) -> Iterator[Move]:
    """Everything that can happen next."""
    if at_once:
        first = next(filter(None, (list(_moves_at(world, x)) for x in world.processes)), None)
        if first is not None:
            yield from first
            return
    waits = True
    for move in _quiet_moves(world):
        waits = False
        yield move
    if waits and world.processes:
        yield ("time passes",)
    yield from _faults(world)


def _quiet_moves(world: World) -> Iterator[Move]:
    for number, c in world.connections.items():
        if c.up and c.acceptor in world.processes:
            yield ("deliver up", number)
        if c.down and c.dialler in world.processes:
            yield ("deliver down", number)
    for member, process in world.processes.items():
        yield from _moves_at(world, member)
        if process.probes:
            yield ("probe", member)


def _moves_at(world: World, member: MemberId) -> Iterator[Move]:
    """Of a trainer, and of the replicas that it makes."""
    for move in world.trainer_moves(member):
        yield ("trainer", member, move)
    if world.can_put(member):
        yield ("put", member)


def _faults(world: World) -> Iterator[Move]:
    if world.losses_left:
        for member, process in world.processes.items():
            if process.core.end is None:
                yield ("crash", member)
    if world.crashes_left:
        for member, process in world.processes.items():
            if process.core.end is None and process.state is not GONE:
                yield ("trainer dies", member)
    if world.resets_left:
        for number, c in world.connections.items():
            if c.up is not None and c.down is not None:
                for up in (keep_all, keep_none) if c.up else (keep_all,):
                    for down in (keep_all, keep_none) if c.down else (keep_all,):
                        yield ("reset", number, up, down)
    if world.suspicions_left:
        for member in world.processes:
            yield ("suspects", member)
    if world.copies_left:
        for number, c in world.connections.items():
            if c.up and c.up[0] is not ENDED:
                yield ("repeat", number, True)
            if c.down and c.down[0] is not ENDED:
                yield ("repeat", number, False)

    for index, late in enumerate(world.late):
        if world.is_late(late):
            yield ("late", index)
    if world.late_left:
        for number, c in world.connections.items():
            for is_up, queue in ((True, c.up), (False, c.down)):
                if queue and epoch_of(queue[0]) > 0 and isinstance(queue[0], world.late_kinds):
                    yield ("keep copy", number, is_up)


def apply(world: World, move: Move) -> None:
    match move:
        case ("deliver up", number):
            world.deliver_up(number)
        case ("deliver down", number):
            world.deliver_down(number)
        case ("trainer", member, name):
            world.trainer(member, name)
        case ("put", member):
            world.put(member)
        case ("probe", member):
            world.answer_probe(member)
        case ("crash", member):
            node = world.processes[member].core.me.node
            gone = [x for x, p in world.processes.items() if p.core.me.node == node]
            world.losses_left -= 1
            world.crash(gone)
        case ("trainer dies", member):
            world.crashes_left -= 1
            world.trainer_dies(member)
        case ("reset", number, up, down):
            world.resets_left -= 1
            world.reset(number, up, down)
        case ("suspects", member):
            world.suspicions_left -= 1
            for _ in range(world.settings.bounds.silence + 1):
                if member in world.processes:
                    world.tick(member)
        case ("keep copy", number, up):
            world.late_left -= 1
            world.keep_copy(number, up=up)
        case ("late", index):
            world.deliver_late(index)
        case ("repeat", number, up):
            world.copies_left -= 1
            world.repeat(number, up=up)
        case _:
            pass_time(world)
    world.check()


def pass_time(world: World) -> None:
    """Every clock ticks once; who looks for a contact finds one."""
    world.rounds += 1
    seeking = [x for x, p in world.processes.items() if p.seeks_contact]
    for member in list(world.processes):
        if member in world.processes:
            world.tick(member)
    deliver_heartbeats(world)
    for member in seeking:
        if member in world.processes and world.processes[member].seeks_contact:
            world.answer_contact(member, list(world.processes))


def deliver_heartbeats(world: World) -> None:
    for number in list(world.connections):
        for is_up in (True, False):
            c = world.connections.get(number)
            queue = (c.up if is_up else c.down) if c is not None else None
            if queue and isinstance(queue[0], m.Heartbeat):
                world.deliver_up(number) if is_up else world.deliver_down(number)


def run_quietly(world: World, until: Callable[[World], bool], most: int = 20_000) -> World:
    """The first possible move again and again, without faults."""
    for _ in range(most):
        if until(world):
            return world
        apply(world, next(_quiet_moves(world), ("time passes",)))
    raise AssertionError(f"not reached in {most} moves")


class Searched(NamedTuple):
    num_states: int
    ends: Counter[tuple[int, ...]]
    """Exit codes of the guardians that were not killed, without those that were fenced."""
    most_rounds: int
    """Times that all clocks ticked, on a shortest way to any state."""


def search(
    first: World,
    *,
    allowed: Callable[[Set[int]], bool] = lambda codes: True,
    at_once: bool = False,
    most: int = 3_000_000,
    most_rounds: int = 200,
) -> Searched:
    """allowed: whether an execution may end with these exit codes.

    Raises Violated with a shortest way to what breaks an invariant, or to a state from which
    no end can be reached. A bug of a core that raises AssertionError is told alike."""
    numbers: dict[Hashable, int] = {first.key(): 0}
    ways: list[tuple[int, Move]] = [(-1, ())]
    frontier: deque[tuple[int, World]] = deque([(0, first)])
    edges_from, edges_to = array("q"), array("q")
    ends: Counter[tuple[int, ...]] = Counter()
    end_states: list[int] = []
    rounds = 0
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        while frontier:
            number, world = frontier.popleft()
            if not world.processes:
                codes = set(world.history.exits.values())
                if not allowed(codes):
                    told = told_way(first, ways, number, None)
                    raise Violated(f"5: it ends with {sorted(codes)}\n{told}")
                ends[tuple(sorted(codes))] += 1
                end_states.append(number)
                continue
            for move in list(moves_of(world, at_once=at_once)):
                following = world.copy()
                try:
                    apply(following, move)
                    if following.rounds > most_rounds:
                        raise Violated(f"5: no end after {most_rounds} ticks")
                except (Violated, AssertionError, LookupError, StopIteration) as error:
                    told = told_way(first, ways, number, move)
                    raise Violated(f"{type(error).__name__}: {error}\n{told}") from error
                key = following.key()
                known = numbers.get(key)
                if known is None:
                    known = numbers[key] = len(numbers)
                    ways.append((number, move))
                    frontier.append((known, following))
                    rounds = max(rounds, following.rounds)
                edges_from.append(number)
                edges_to.append(known)
            if len(numbers) > most:
                raise AssertionError(f"more than {most} states")
    finally:
        if gc_was_on:
            gc.enable()
    stuck = _without_end(len(numbers), edges_from, edges_to, end_states)
    if stuck is not None:
        told = told_way(first, ways, stuck, None)
        raise Violated(f"5: no end can be reached\n{told}")
    return Searched(len(numbers), ends, rounds)


def _without_end(
    count: int, sources: array[int], targets: array[int], ends: list[int]
) -> int | None:
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    reached = bytearray(count)
    todo = list(ends)
    for end in ends:
        reached[end] = 1
    while todo:
        for source in before[todo.pop()]:
            if not reached[source]:
                reached[source] = 1
                todo.append(source)
    return next((state for state in range(count) if not reached[state]), None)


def told_way(first: World, ways: list[tuple[int, Move]], number: int, last: Move | None) -> str:
    """The moves to a state, replayed with what each of them did."""
    moves = [last] if last is not None else []
    while number:
        number, move = ways[number]
        moves.append(move)
    lines: list[str] = []
    world = first.copy()
    world.trace = lines.append
    try:
        for move in reversed(moves):
            if move[0] in ("crash", "suspects", "time passes"):
                lines.append(" ".join(map(str, move)))
            apply(world, move)
    except (Violated, AssertionError, LookupError, StopIteration):
        pass
    return "\n".join(lines)
