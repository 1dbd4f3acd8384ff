"""One random execution a seed: delays, and faults where they hurt. Time is counted in ticks."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from deadpool.protocol import messages as m
from deadpool.protocol.invariants import Violated, require
from deadpool.protocol.types import Bounds, MemberId, Node
from deadpool.simulation.world import (
    ENDED,
    IN_LOOP,
    NO_MISTAKES,
    Mistakes,
    World,
    keep_some,
    small_grid,
)

BOUNDS = Bounds(silence=4, seek=4, minority=40, start=40, recovery=25, leave=8)
LONGEST = 600.0
"""Ticks after which an execution that has not ended is wrong."""

KINDS = (
    "crash", "kill guardian", "kill trainer", "stop", "partition", "reset", "suspect", "late node",
    "repeat", "hang trainer",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a seed means."""

    seed: int
    num_nodes: int
    ranks_per_node: int
    num_spare_nodes: int
    last: int
    num_faults: int
    num_regroup_failures: int
    delay: float
    """Mean of a message."""
    stray: float
    """How many messages take ten times as long."""
    returns: float
    """How often a node that was lost comes back under its name."""
    kinds: tuple[str, ...]
    replicas: int = 1
    lack: int = 0
    """Ticks that a job without a node for every slot waits for one."""


def scenario_of(seed: int, num_nodes: int | None = None) -> Scenario:
    chooser = random.Random(f"scenario {seed}")
    nodes = num_nodes or chooser.choice((2, 2, 3, 3, 4))
    return Scenario(
        seed=seed,
        num_nodes=nodes,
        lack=random.Random(f"lack {seed}").choice((0, 30)),
        replicas=1 if nodes < 3 else random.Random(f"replicas {seed}").choice((1, 1, 2)),
        ranks_per_node=chooser.choice((1, 1, 1, 2)),
        num_spare_nodes=chooser.choice((0, 1, 1, 2, 2, 3)),
        last=chooser.randint(1, 6),
        num_faults=chooser.choice((0, 1, 1, 2, 2, 3, 4, 5)),
        num_regroup_failures=chooser.choice((0, 0, 0, 1, 3, 8)),
        delay=chooser.choice((0.02, 0.1, 0.1, 0.3, 0.8)),
        stray=chooser.choice((0.0, 0.02, 0.1)),
        returns=chooser.choice((0.0, 0.5, 1.0)),
        kinds=tuple(chooser.sample(KINDS, chooser.randint(1, 4))),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    scenario: Scenario
    exit_codes: tuple[int, ...]
    """Of the guardians that were not killed."""
    faults: tuple[str, ...]
    num_epochs: int
    num_events: int
    ticks: float

    @property
    def kind(self) -> str:
        return " ".join(map(str, sorted(set(self.exit_codes)))) or "nobody left"


class Schedule:
    """Runs one scenario. trace: called with one line per event."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        trace: Callable[[str], None] | None = None,
        mistakes: Mistakes = NO_MISTAKES,
    ) -> None:
        self._scenario = scenario
        self._chooser = random.Random(f"schedule {scenario.seed}")
        self._now = 0.0
        self._heap: list[tuple[float, int, str, int]] = []
        self._order = 0
        self._pending: set[tuple[str, int]] = set()
        self._trace = trace
        self._stopped: set[MemberId] = set()
        self._blocked: dict[tuple[Node, Node], float] = {}
        """Until when nothing goes from one node to another."""
        self._faults: list[str] = []
        self._is_mild = True
        """Faults came after the first commit and concern one node."""
        self._rates: dict[int, float] = {}
        self._next_node = scenario.num_nodes + scenario.num_spare_nodes
        self.world = World(
            grid=small_grid(scenario.num_nodes, scenario.ranks_per_node),
            num_spare_nodes=scenario.num_spare_nodes,
            last=scenario.last,
            replicas=scenario.replicas,
            bounds=dataclasses.replace(BOUNDS, lack=scenario.lack),
            mistakes=mistakes,
            agenda=self._becomes_possible,
        )
        self.world.regroup_failures_left = scenario.num_regroup_failures
        if trace is not None:
            self.world.trace = lambda words: trace(f"{self._now:8.2f} {words}")
        self._plan_faults()

    def run(self) -> Outcome:
        """Raises Violated, or the AssertionError of a core."""
        world = self.world
        num_events = 0
        while self._heap and world.processes:
            self._now, _, kind, number = heapq.heappop(self._heap)
            if self._now > LONGEST:
                raise Violated(f"5: no end after {LONGEST:.0f} ticks: {self._describe()}")
            num_events += 1
            _EVENTS[kind](self, number)
        require(not world.processes, f"5: nothing can happen: {self._describe()}")
        outcome = Outcome(
            scenario=self._scenario,
            exit_codes=tuple(world.history.exits.values()),
            faults=tuple(self._faults),
            num_epochs=max(world.history.plans, default=0),
            num_events=num_events,
            ticks=self._now,
        )
        self._check_end(outcome)
        return outcome

    def _describe(self) -> str:
        cores = [p.core for p in self.world.processes.values()]
        return ", ".join(
            f"{c.me.member} {c.standing.value}"
            + (f" leads {c.leader.phase.value}" if c.leader else "")
            for c in cores
        )

    def _check_end(self, outcome: Outcome) -> None:
        """Without faults training completes; after one that a spare node can make up for, too.

        Not asked where messages are so slow that silence is taken for loss."""
        scenario, codes = self._scenario, set(outcome.exit_codes)
        slowest = scenario.delay * 2 * (10 if scenario.stray else 1)
        if scenario.num_regroup_failures > 3 or slowest * 2 + 1.1 > BOUNDS.silence:
            return
        if not self._faults:
            require(codes == {0}, f"5: no fault, and it ends with {outcome.kind}")
        elif len(self._faults) == 1 and self._is_mild and scenario.num_spare_nodes:
            require(0 in codes, f"5: one fault, a spare, and it ends with {outcome.kind}")

    # What happens when

    def _at(self, delay: float, kind: str, number: int) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self._now + delay, self._order, kind, number))

    def _becomes_possible(self, kind: str, number: int) -> None:
        chooser = self._chooser
        if kind in ("up", "down"):
            delay = chooser.random() * 2 * self._scenario.delay
            if self._scenario.stray and chooser.random() < self._scenario.stray:
                delay *= 10
        elif kind == "tick":
            delay = chooser.random()
        elif kind == "contact":
            delay = 0.3 + chooser.random() * 2
        else:
            if (kind, number) in self._pending:
                return
            self._pending.add((kind, number))
            delay = chooser.random() * (0.2 if kind == "trainer" else 2 * self._scenario.delay)
        self._at(delay, kind, number)

    def _node(self, member: MemberId) -> Node | None:
        process = self.world.processes.get(member)
        return process.core.me.node if process is not None else None

    def _is_blocked(self, source: MemberId, target: MemberId) -> float:
        """For how long, or 0."""
        if not self._blocked:
            return 0.0
        ends: Any = (self._node(source), self._node(target))
        return max(0.0, self._blocked.get(ends, 0.0) - self._now)

    def _up(self, number: int) -> None:
        c = self.world.connections.get(number)
        if c is None or not c.up or c.acceptor not in self.world.processes:
            return
        if self._is_held(number, "up", c.dialler, c.acceptor, c.up[0]):
            return
        self.world.deliver_up(number)

    def _down(self, number: int) -> None:
        c = self.world.connections.get(number)
        if c is None or not c.down or c.dialler not in self.world.processes:
            return
        if self._is_held(number, "down", c.acceptor, c.dialler, c.down[0]):
            return
        message = c.down[0]
        self.world.deliver_down(number)
        if isinstance(message, m.Propose):
            self.world.check()

    def _is_held(
        self, number: int, way: str, source: MemberId, target: MemberId, message: Any
    ) -> bool:
        if target in self._stopped:
            self._at(0.5, way, number)
            return True
        if not self._blocked or message is ENDED:
            return False
        held = self._is_blocked(source, target)
        if not held:
            return False
        if self._chooser.random() < 0.1:
            self._reset(number)
        else:
            self._at(min(held, 3.0) + self._chooser.random() * 0.1, way, number)
        return True

    def _reset(self, number: int) -> None:
        cut = keep_some(self._chooser)
        self.world.reset(number, cut, cut)

    def _tick(self, number: int) -> None:
        member = MemberId(number)
        if member not in self.world.processes:
            return
        if member not in self._stopped:
            self.world.tick(member)
        rate = self._rates.setdefault(number, self._chooser.uniform(0.9, 1.1))
        self._at(rate, "tick", number)

    def _contact(self, number: int) -> None:
        member = MemberId(number)
        process = self.world.processes.get(member)
        if process is None or not process.seeks_contact:
            return
        among = list(self.world.processes)
        self._chooser.shuffle(among)
        if member in self._stopped or not self.world.answer_contact(member, among):
            self._at(1.0, "contact", number)

    def _probe(self, number: int) -> None:
        self._pending.discard(("probe", number))
        member = MemberId(number)
        process = self.world.processes.get(member)
        if process is None or not process.probes:
            return
        if self._chooser.random() < 0.5:
            process.probes = process.probes[1:]  # Its host is gone, too: nobody answers.
        else:
            self.world.answer_probe(member)
        if member in self.world.processes and process.probes:
            self.world._tell_agenda("probe", number)

    def _trainer(self, number: int) -> None:
        self._pending.discard(("trainer", number))
        member = MemberId(number)
        if member not in self.world.processes:
            return
        if member in self._stopped:
            return  # Woken when it goes on.
        moves = list(self.world.trainer_moves(member))
        if not moves:
            return
        move = self._chooser.choice(moves)
        if "fails to regroup" in moves:
            move = "fails to regroup" if self._chooser.random() < 0.3 else "restores"
        self.world.trainer(member, move)
        if move == "steps":
            self.world.check()

    def _put(self, number: int) -> None:
        self._pending.discard(("put", number))
        member = MemberId(number)
        process = self.world.processes.get(member)
        if process is None or not process.puts:
            return
        holder = process.puts[0].holder
        if (
            not self.world.can_put(member)
            or {member, holder} & self._stopped
            or self._is_blocked(member, holder)
        ):
            self._pending.add(("put", number))
            self._at(0.5, "put", number)  # Tried again.
            return
        self.world.put(member)
        self.world.check()

    def _transfer(self, number: int) -> None:
        self._pending.discard(("transfer", number))
        if self.world.transfers:
            index = self._chooser.randrange(len(self.world.transfers))
            self.world.end_transfer(index, arrives=self._chooser.random() < 0.7)
            self.world.check()

    # Faults

    def _plan_faults(self) -> None:
        chooser = self._chooser
        time = 0.0
        for number in range(self._scenario.num_faults):
            # Often close to the one before: inside its recovery.
            near = number and chooser.random() < 0.7
            time = time + chooser.expovariate(0.7) if near else chooser.uniform(0.0, 25.0)
            self._at(time, "fault", 0)

    def _fault(self, number: int) -> None:
        chooser = self._chooser
        kind = chooser.choice(self._scenario.kinds)
        victim = self._victim()
        words = f"{kind} {victim} (node {self._node(victim)})"
        self._faults.append(f"{self._now:.2f} {words}")
        if not self.world.history.commits:
            self._is_mild = False
        if self._trace is not None:
            self._trace(f"{self._now:8.2f} ---- {words}")
        _FAULTS[kind](self, victim)

    def _victim(self) -> MemberId:
        """The leader often, or a member that holds a slot it was not born to."""
        world, chooser = self.world, self._chooser
        draw = chooser.random()
        leaders = [x for x, _ in world.leaders()]
        if draw < 0.35 and leaders:
            return chooser.choice(leaders)
        if draw < 0.55:
            fresh = [x for x, p in world.processes.items() if p.core.plan and not p.core.has_state]
            if fresh:
                return chooser.choice(fresh)
        return chooser.choice(list(world.processes))

    def _crash(self, victim: MemberId) -> None:
        node = self._node(victim)
        assert node is not None
        gone = [x for x, p in self.world.processes.items() if p.core.me.node == node]
        self.world.crash(gone, keep_some(self._chooser))
        self._may_return(node)

    def _kill_guardian(self, victim: MemberId) -> None:
        node = self._node(victim)
        assert node is not None
        self.world.crash([victim], keep_some(self._chooser))
        self._may_return(node)

    def _may_return(self, node: Node) -> None:
        if self._chooser.random() < self._scenario.returns:
            self._at(self._chooser.uniform(0.2, 12.0), "return", node)

    def _return(self, number: int) -> None:
        """A node's guardians are started again, those of before, if still there, being killed."""
        node = Node(number)
        left = [x for x, p in self.world.processes.items() if p.core.me.node == node]
        self.world.crash(left, keep_some(self._chooser))
        for rank in range(self._scenario.ranks_per_node):
            self.world.start(node, rank)

    def _late_node(self, victim: MemberId) -> None:
        self._at(self._chooser.uniform(0.0, 3.0), "return", self._next_node)
        self._next_node += 1

    def _kill_trainer(self, victim: MemberId) -> None:
        node = self._node(victim)
        assert node is not None
        self.world.trainer_dies(victim, can_respawn=self._chooser.random() < 0.7)
        if victim not in self.world.processes:
            self._may_return(node)

    def _hang_trainer(self, victim: MemberId) -> None:
        """Its guardian notices after a while, and so do those of others that wait for it."""
        self.world.hang(victim)
        for member in self.world.processes:
            self._at(self._chooser.uniform(5.0, 7.0), "stalled", member)

    def _stalled(self, number: int) -> None:
        member = MemberId(number)
        process = self.world.processes.get(member)
        if process is None:
            return
        if member not in self._stopped and process.state in IN_LOOP:
            self.world.trainer_stalls(member)
        if member in self.world.processes and process.is_hung:
            self._at(self._chooser.uniform(2.0, 4.0), "stalled", member)

    def _stop(self, victim: MemberId) -> None:
        self._stopped.add(victim)
        if victim in self.world.processes:
            self.world.processes[victim].is_stopped = True
        self._at(self._chooser.expovariate(0.15), "continue", victim)

    def _continue(self, number: int) -> None:
        member = MemberId(number)
        self._stopped.discard(member)
        process = self.world.processes.get(member)
        if process is not None:
            process.is_stopped = False
            self._becomes_possible("trainer", member)

    def _partition(self, victim: MemberId) -> None:
        """One side has the victim and maybe others; either way or both ways are cut."""
        chooser = self._chooser
        nodes = sorted({p.core.me.node for p in self.world.processes.values()})
        here = self._node(victim)
        inside = {here} | {n for n in nodes if chooser.random() < 0.25}
        if len(inside) > 1:
            self._is_mild = False
        ways = chooser.choice(("in", "out", "both", "both"))
        until = self._now + chooser.expovariate(0.12)
        for a in inside:
            for b in nodes:
                if a is None or b in inside:
                    continue
                if ways != "in":
                    self._blocked[a, b] = until
                if ways != "out":
                    self._blocked[b, a] = until

    def _reset_some(self, victim: MemberId) -> None:
        ours = [
            number
            for number, c in self.world.connections.items()
            if victim in (c.dialler, c.acceptor) and c.up is not None and c.down is not None
        ]
        if ours:
            self._reset(self._chooser.choice(ours))

    def _suspect(self, victim: MemberId) -> None:
        if any(member == victim for member, _ in self.world.leaders()):
            self._is_mild = False  # It suspects many at once.
        for _ in range(BOUNDS.silence + 1):
            if victim in self.world.processes:
                self.world.tick(victim)

    def _repeat(self, victim: MemberId) -> None:
        for number, c in list(self.world.connections.items()):
            for is_up, queue in ((True, c.up), (False, c.down)):
                if queue and queue[0] is not ENDED and self._chooser.random() < 0.3:
                    self.world.repeat(number, up=is_up)


_EVENTS: dict[str, Callable[[Schedule, int], None]] = {
    "up": Schedule._up,
    "down": Schedule._down,
    "tick": Schedule._tick,
    "contact": Schedule._contact,
    "probe": Schedule._probe,
    "trainer": Schedule._trainer,
    "put": Schedule._put,
    "transfer": Schedule._transfer,
    "fault": Schedule._fault,
    "return": Schedule._return,
    "continue": Schedule._continue,
    "stalled": Schedule._stalled,
}

_FAULTS: dict[str, Callable[[Schedule, MemberId], None]] = {
    "crash": Schedule._crash,
    "kill guardian": Schedule._kill_guardian,
    "kill trainer": Schedule._kill_trainer,
    "stop": Schedule._stop,
    "partition": Schedule._partition,
    "reset": Schedule._reset_some,
    "suspect": Schedule._suspect,
    "late node": Schedule._late_node,
    "repeat": Schedule._repeat,
    "hang trainer": Schedule._hang_trainer,
}


def run_seed(
    seed: int,
    *,
    num_nodes: int | None = None,
    trace: Callable[[str], None] | None = None,
    mistakes: Mistakes = NO_MISTAKES,
) -> Outcome:
    scenario = scenario_of(seed, num_nodes)
    if trace is not None:
        trace(f"{scenario}")
    return Schedule(scenario, trace=trace, mistakes=mistakes).run()


def summarize(outcomes: Counter[str]) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in outcomes.most_common())
