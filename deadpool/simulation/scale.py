"""The cores of a whole job joined by one queue: what the protocol costs as nodes are added.

Every message comes, in the order of sending, at once; time passes when `tick` is called. Trainers
and replicas are stood in for by their answers. For faults and orders, see the other modules of
this package; here, only work and bytes are counted.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Sequence

from deadpool.messages import encode
from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.leader import Settings, StepDown
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Bounds, Iteration, Member, MemberId, Node, Plan, Roster

BOUNDS = Bounds(silence=5, seek=10, minority=60, start=600, recovery=120, leave=5)
"""The defaults of `deadpool.config`, at a heartbeat a second."""

_ENDED = "the connection ended"

Observer = Callable[[MemberId, e.Event, Sequence[e.Action]], None]


@dataclasses.dataclass(slots=True, kw_only=True)
class Cost:
    """Of what happened between two looks; bytes are whole frames between guardians."""

    num_messages: int = 0
    num_bytes: int = 0
    largest: int = 0
    largest_type: str = ""
    num_leader_messages: int = 0
    """Sent or taken by a guardian that led then."""
    proposal_bytes: int = 0
    """The largest Propose."""
    leader_s: float = 0.0
    """CPU seconds inside the core that leads in the end."""
    follower_s: float = 0.0
    """The same, of the busiest other core."""


class _SharingGuardian(Guardian):
    """Keeps one copy of rosters and plans that are equal for all: 8,192 cores in one process would
    fill the memory otherwise. The first follower of each kind composes by itself and is the one
    whose seconds count; the others take its roster."""

    def __init__(
        self, settings: Settings, me: Member, shared: dict[object, Roster], plans: list[Plan]
    ) -> None:
        self._shared = shared
        self._plans = plans
        super().__init__(settings, me)

    def _compose(self, message: m.Propose) -> Roster:
        key = (message.id, message.leader, message.base)
        if key not in self._shared:
            self._shared[key] = super()._compose(message)
        return self._shared[key]

    def _adopt(self, message: m.Propose, roster: Roster) -> list[e.Action | StepDown]:
        actions = super()._adopt(message, roster)
        assert self.plan is not None
        if not self._plans or self._plans[-1] != self.plan:
            self._plans.append(self.plan)
        self.plan = self._plans[-1]
        return [
            dataclasses.replace(action, plan=self.plan)
            if isinstance(action, e.AdoptPlan)
            else action
            for action in actions
        ]


class Cluster:
    """observe: called with each call of a core, as a trace wants it."""

    def __init__(
        self, grid: Grid, num_spare_nodes: int = 1, *, observe: Observer | None = None
    ) -> None:
        self.settings = Settings(
            grid=grid, num_spare_nodes=num_spare_nodes, replicas=1, bounds=BOUNDS
        )
        self.grid = grid
        self.cores: dict[MemberId, Guardian] = {}
        """Those alive."""
        self.cost = Cost()
        self._observe = observe
        self._random = random.Random(0)
        self._queue: deque[tuple[MemberId, e.Event]] = deque()
        self._dialled: dict[MemberId, MemberId] = {}
        """Follower to the one that it has a connection to."""
        self._lonely: list[MemberId] = []
        self._own: dict[MemberId, set[Iteration]] = {}
        self._seconds: dict[MemberId, float] = {}
        self._shared: dict[object, Roster] = {}
        self._plans: list[Plan] = []
        self._num_nodes = grid.num_nodes + num_spare_nodes

    # What happens

    def form(self) -> None:
        """All nodes of the launch come; the job forms and trains."""
        cores = [core for node in range(self._num_nodes) for core in self._add(Node(node))]
        for core in cores:
            self._put(core.me.member, e.Started(forms_job=core is cores[0]))
        self.run()

    def join(self) -> Node:
        """One more node comes."""
        node = Node(self._num_nodes)
        self._num_nodes += 1
        for core in self._add(node):
            self._put(core.me.member, e.Started(forms_job=False))
        self.run()
        return node

    def train(self, iteration: Iteration) -> None:
        """Every slot completes and stages one iteration."""
        for member, core in self.cores.items():
            if core.slot is not None:
                self._own[member].add(iteration)
                self._put(member, e.Captured(epoch=core.promised, iteration=iteration))
        self.run()

    def tick(self) -> None:
        for member in self.cores:
            self._put(member, e.Tick())
        self.run()

    def lose(self, node: Node) -> None:
        """All of the node's processes die at once."""
        self._remove({x for x, core in self.cores.items() if core.me.node == node})
        self.run()

    def finish(self) -> None:
        """Every trainer has nothing left to do."""
        for member, core in self.cores.items():
            if core.slot is not None:
                self._put(member, e.TrainerSaid(message=m.Finished(epoch=core.promised)))
        self.run()

    # Looking

    @property
    def leader(self) -> Guardian:
        (core,) = (core for core in self.cores.values() if core.leader is not None)
        return core

    def take_cost(self) -> Cost:
        """What happened since the last look."""
        cost, self.cost = self.cost, Cost()
        leader = self.leader.me.member
        cost.leader_s = self._seconds.get(leader, 0.0)
        others = (s for member, s in self._seconds.items() if member != leader)
        cost.follower_s = max(others, default=0.0)
        self._seconds.clear()
        return cost

    # Delivery

    def run(self) -> None:
        """Until nothing is under way."""
        while self._queue or self._introduce():
            member, event = self._queue.popleft()
            core = self.cores.get(member)
            if core is not None:
                self._handle(core, event)

    def _introduce(self) -> bool:
        """Who looks for the job is sent to its leader; while there is none, it waits."""
        leader = next((x.me for x in self.cores.values() if x.leader is not None), None)
        if leader is None or not self._lonely:
            return False
        for member in self._lonely:
            self._put(member, e.Contact(member=leader))
        self._lonely.clear()
        return True

    def _handle(self, core: Guardian, event: e.Event) -> list[e.Action]:
        before = time.thread_time()
        actions = core.handle(event)
        spent = time.thread_time() - before
        member = core.me.member
        self._seconds[member] = self._seconds.get(member, 0.0) + spent
        if self._observe is not None:
            self._observe(member, event, actions)
        for action in actions:
            self._carry_out(core, action)
        return actions

    def _add(self, node: Node) -> list[Guardian]:
        added: list[Guardian] = []
        for local_rank in range(self.grid.ranks_per_node):
            me = Member(
                member=MemberId(self._random.getrandbits(62)),
                node=node,
                local_rank=local_rank,
                host=f"10.{node >> 16 & 255}.{node >> 8 & 255}.{node & 255}",
                control_port=40000 + local_rank,
                data_port=50000 + local_rank,
            )
            core = _SharingGuardian(self.settings, me, self._shared, self._plans)
            self.cores[me.member] = core
            self._own[me.member] = set()
            added.append(core)
        return added

    def _put(self, member: MemberId, event: e.Event) -> None:
        self._queue.append((member, event))

    def _count(self, frame: bytes, message: object, times: int, *, leads: int) -> None:
        cost, size = self.cost, len(frame)
        cost.num_messages += times
        cost.num_bytes += times * size
        cost.num_leader_messages += leads
        if size > cost.largest:
            cost.largest, cost.largest_type = size, type(message).__name__
        if isinstance(message, m.Propose):
            cost.proposal_bytes = max(cost.proposal_bytes, size)

    def _carry_out(self, core: Guardian, action: e.Action) -> None:
        me = core.me.member
        match action:
            case e.ToLeader():
                self._to_leader(me, action.leader.member, action.message)
            case e.ToFollowers():
                reached = [x for x in action.members if self._dialled.get(x) == me]
                message = action.message
                leads = len(reached) * (core.leader is not None)
                self._count(encode(message), message, len(reached), leads=leads)
                for member in reached:
                    self._put(member, e.FromLeader(sender=me, message=message))
            case e.HangUp():
                for member in action.members:
                    if self._dialled.get(member) == me:
                        del self._dialled[member]
                        self._put(member, e.LeaderGone(sender=me, reason=_ENDED))
            case e.Probe():
                if action.member.member not in self.cores:
                    self._put(me, e.Dead(member=action.member.member))
            case e.FindContact():
                self._lonely.append(me)
            case e.AbortTrainer():
                port = 29500 if action.opens_store else 0
                own = frozenset(self._own[me])
                aborted = e.TrainerAborted(epoch=action.epoch, store_port=port, own=own)
                self._put(me, aborted)
            case e.AdoptPlan():
                self._adopt(me, action)
            case e.Put():
                self._replicate(me, action)
            case e.Exit():
                self._remove({me})

    def _remove(self, gone: set[MemberId]) -> None:
        """Processes that have ended, and what the others hear of their connections."""
        for member in gone:
            del self.cores[member]
        for follower, leader in list(self._dialled.items()):
            if follower in gone and leader not in gone:
                self._put(leader, e.FollowerGone(sender=follower, reason=_ENDED))
            elif leader in gone and follower not in gone:
                self._put(follower, e.LeaderGone(sender=leader, reason=_ENDED))
            if follower in gone or leader in gone:
                del self._dialled[follower]

    def _to_leader(self, me: MemberId, leader: MemberId, message: m.Upstream) -> None:
        older = self._dialled.get(me)
        if older is not None and older != leader:
            self._put(older, e.FollowerGone(sender=me, reason=_ENDED))
        core = self.cores.get(leader)
        self._count(encode(message), message, 1, leads=core is not None and core.leader is not None)
        if core is None:
            self._dialled.pop(me, None)
            self._put(me, e.LeaderGone(sender=leader, reason="cannot connect"))
        else:
            self._dialled[me] = leader
            self._put(leader, e.FromFollower(sender=me, message=message))

    def _adopt(self, me: MemberId, action: e.AdoptPlan) -> None:
        restart, own = action.plan.restart, self._own[me]
        if restart.restore is not None:
            own -= {i for i in own if i > restart.restore}
            own.add(restart.restore)
        seconds = {"regroup": 0.1, "restore": 0.1, "verify": 0.1}
        ready = m.Ready(epoch=action.plan.epoch, seconds=seconds, num_bytes=0, iterations_rerun=0)
        self._put(me, e.TrainerSaid(message=ready))

    def _replicate(self, me: MemberId, put: e.Put) -> None:
        """The holder's core decides as in a job; the bytes are always there."""
        (member,) = put.holders
        holder = self.cores.get(member.member)
        if holder is None:
            return
        offered = e.Offered(
            slot=put.slot, epoch=put.epoch, iteration=put.iteration, num_bytes=4096, checksum=1
        )
        (answer,) = self._handle(holder, offered)
        assert isinstance(answer, e.AnswerOffer)
        if answer.buffer is not None:
            fields = {name: getattr(offered, name) for name in e.Offered.__slots__}
            received = e.Received(**fields, buffer=answer.buffer, announced=1)
            (answer,) = self._handle(holder, received)
            assert isinstance(answer, e.AnswerOffer)
        if not answer.refusal:
            self._put(me, e.PutDone(epoch=put.epoch, iteration=put.iteration))
