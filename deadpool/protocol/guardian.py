"""The core of one guardian: follows a leader, leads when its turn comes, keeps the ledger.

`Guardian.handle` takes one event and returns the actions to carry out, in order. Messages of a
guardian to itself (a leader follows itself) never leave the core.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from deadpool.protocol import events as e
from deadpool.protocol import messages as m
from deadpool.protocol.events import Action
from deadpool.protocol.leader import Leader, Settings, StepDown
from deadpool.protocol.placement import assign_slots, choose_holders
from deadpool.protocol.rosters import compose
from deadpool.protocol.snapshots import ShelfLedger
from deadpool.protocol.types import (
    EXIT_FENCED,
    EXIT_MINORITY,
    EXIT_NO_JOB,
    HUNG,
    STALLED,
    End,
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Plan,
    ProtocolError,
    Roster,
    Slot,
    Standing,
)

STAY = 4
"""How many times longer a candidate that answers is supported than one that does not: supporters,
that notice their loss at different times, so meet."""


class Guardian:
    """me: this guardian, as others know it. settings: alike for all guardians of the job."""

    def __init__(self, settings: Settings, me: Member) -> None:
        self._settings = settings
        self._holders = choose_holders(settings.grid, settings.replicas)
        self.me = me
        self.standing = Standing.JOINING
        self.leader: Leader | None = None
        """Its leading part, while it leads."""
        self.upstream: Member | None = None
        """Whom it follows, or supports."""
        self.promised = Epoch(0)
        """The epoch it has entered: nothing of an older one is taken."""
        self._promised_to: Member | None = None
        """The leader of that epoch."""
        self.installed: Roster | None = None
        self.accepted: list[Roster] = []
        """Rosters after the installed one, oldest first: each may be in force."""
        self.plan: Plan | None = None
        self.slot: Slot | None = None
        """What its trainer was built for."""
        self.has_state = False
        self.committed: Iteration | None = None
        self.shelf = ShelfLedger(settings.grid.world_size)
        self.end: End | None = None
        self._has_answered = Epoch(0)
        self._opens_store = False
        """Its trainer, in the promised epoch."""
        self._crashed_in = Epoch(0)
        """The epoch that its trainer last died in after it had answered: it has no part in it."""
        self._killed = ""
        """Why its trainer was killed, until the news of its end."""
        self._respawns: list[int] = []
        """For each trainer started in the place of one that died, ticks until it counts no more."""
        self._age = 0
        """Ticks since the leader was heard, or since support was given."""
        self._waited = 0
        """Ticks of joining, of seeking, and of leading before a majority was heard, since this
        guardian last had its place in an epoch."""
        self._lost: Member | None = None
        """The leader whose loss made it seek."""
        self._tried: set[MemberId] = set()
        self._answered = False
        """The candidate that it supports is there, and waits for others."""
        self._supporters: dict[MemberId, m.Support] = {}
        self._patience: dict[MemberId, int] = {}
        """Ticks until a supporter turns to the next."""
        self._failure: m.Failed | None = None
        """Of the trainer, while there was nobody to tell."""
        self._drains = False

    # Events

    def handle(self, event: e.Event) -> list[Action]:
        """Take one event, return what to do. Raises ProtocolError for what a peer cannot have
        said; any other error is our own, and the core is of no more use."""
        actions: list[Action] = []
        pending: deque[e.Event] = deque([event])
        while pending:
            if self.standing is Standing.LEFT:
                break
            for action in self._dispatch(pending.popleft()):
                rest, inner = self._split(action)
                pending.extend(inner)
                if rest is not None:
                    actions.append(rest)
                if isinstance(action, e.Exit):
                    self.standing, self.leader = Standing.LEFT, None
                    break
        return actions

    def _split(self, action: Action | StepDown) -> tuple[Action | None, list[e.Event]]:
        """What leaves the core of an action, and the events that stay inside."""
        me = self.me.member
        match action:
            case StepDown():
                return None, self._step_down()
            case e.ToLeader() if action.leader.member == me:
                return None, [e.FromFollower(sender=me, message=action.message)]
            case e.ToFollowers() if me in action.members:
                others = tuple(member for member in action.members if member != me)
                rest = e.ToFollowers(members=others, message=action.message) if others else None
                return rest, [e.FromLeader(sender=me, message=action.message)]
            case e.ToFollowers() | e.HangUp() if not action.members:
                return None, []
        assert not isinstance(action, StepDown)
        return action, []

    def _dispatch(self, event: e.Event) -> list[Action | StepDown]:
        return _TABLE[type(event)](self, event)

    # The leading part

    def _from_follower(self, event: e.FromFollower) -> list[Action | StepDown]:
        match event.message:
            case m.Join(member=member) | m.Support(member=member) if member.member != event.sender:
                raise ProtocolError(f"member {event.sender} speaks for {member.member}")
        if self.leader is not None:
            return self.leader.handle(event.sender, event.message)
        match event.message:
            case m.Join():
                leads = self.upstream if self.standing is Standing.FOLLOWING else None
                return [e.ToFollowers(members=(event.sender,), message=m.NotLeader(leader=leads))]
            case m.Support():
                self._supporters[event.sender] = event.message
                self._patience[event.sender] = STAY * self._settings.bounds.seek
                return self._answer_support(event.sender) + self._lead_when_supported()
        return []  # Of a leadership that has ended.

    def _answer_support(self, supporter: MemberId) -> list[Action | StepDown]:
        """So that all come to one candidate: who is none names an earlier one that it supports."""
        answer: m.Downstream | None = None
        if self.standing is Standing.SEEKING and self.upstream == self.me:
            answer = m.Heartbeat()
        elif self.standing is Standing.SEEKING and self.upstream not in (None, self._lost):
            order = [self.me, self.upstream]
            if next((x for x in self._rosters[-1].members if x in order), None) == self.upstream:
                answer = m.NotLeader(leader=self.upstream)
        return [e.ToFollowers(members=(supporter,), message=answer)] if answer else []

    def _follower_gone(self, event: e.FollowerGone) -> list[Action | StepDown]:
        if self.leader is not None:
            return self.leader.gone(event.sender, event.reason)
        self._supporters.pop(event.sender, None)
        return []

    def _dead(self, event: e.Dead) -> list[Action | StepDown]:
        return self.leader.dead(event.member) if self.leader is not None else []

    def _lead_when_supported(self) -> list[Action | StepDown]:
        if self.standing is not Standing.SEEKING or self.upstream != self.me:
            return []
        if self._waited > self._settings.bounds.minority:
            return []  # It has led before, and reached nobody.
        if self.installed is None:
            return []  # A newcomer, that does not know whose majority counts.
        supporters, rosters = self._supporters, self._rosters
        if 2 * (len(supporters) + 1) < max(len(roster.members) for roster in rosters):
            return []  # For speed: asked once a supporter, it may not look at all of them.
        if not all(roster.is_quorum({*supporters, self.me.member}) for roster in rosters):
            return []
        newest = rosters[-1]
        promised = max([self.promised, *(s.promised for s in supporters.values())])
        ends = [s.end for x, s in supporters.items() if s.end and newest.find(x)] + [self.end]
        told = max((end for end in ends if end), key=lambda end: end.epoch, default=None)
        if told is not None and told.epoch >= newest.id.epoch:
            self.leader, actions = Leader.take_over_end(
                self._settings,
                self.me,
                end=dataclasses.replace(told, epoch=Epoch(max(promised, told.epoch) + 1)),
                members=[self.me, *(s.member for s in supporters.values())],
                rosters=rosters,
            )
        else:
            lost = self._lost
            if lost is not None and (lost == self.me or lost.member in supporters):
                lost = None  # It leads no more, and is there.
            elif lost is not None and lost.node == self.me.node:
                return []  # Whoever else leads takes this node for lost.
            self.leader, actions = Leader.succeed(
                self._settings, self.me, rosters=rosters, lost=lost, promised=promised
            )
        self._supporters = {}
        strangers = tuple(x for x in supporters if x not in self.leader.members)
        if not strangers:
            return actions
        fenced = m.Fenced(reason="its node, or its place in the roster, was lost")
        return [
            *actions,
            e.ToFollowers(members=strangers, message=fenced),
            e.HangUp(members=strangers),
        ]

    def _step_down(self) -> list[e.Event]:
        """This leader reaches no majority: seek one that does."""
        self.leader = None
        return [e.LeaderGone(sender=self.me.member, reason="no majority answers")]

    @property
    def _rosters(self) -> list[Roster]:
        return [*([self.installed] if self.installed else []), *self.accepted]

    # Joining and seeking

    def _started(self, event: e.Started) -> list[Action | StepDown]:
        if not event.forms_job:
            return [e.FindContact()]
        self.leader = Leader.form(self._settings, self.me)
        return self._join(self.me)

    def _contact(self, event: e.Contact) -> list[Action | StepDown]:
        return self._join(event.member) if self.standing is Standing.JOINING else []

    def _join(self, leader: Member) -> list[Action | StepDown]:
        self.upstream, self._age = leader, 0
        return [e.ToLeader(leader=leader, message=m.Join(member=self.me))]

    def _leader_gone(self, event: e.LeaderGone) -> list[Action | StepDown]:
        if self.upstream is None or event.sender != self.upstream.member:
            return []
        if self.standing is Standing.SEEKING:
            return self._support_next()
        return self._seek(is_silent=False)

    def _seek(self, *, is_silent: bool) -> list[Action | StepDown]:
        """The leader is lost: support its successors, one after the other. Where the connection
        ended, itself first: it may be there and the connection alone be gone."""
        lost, self.upstream = self.upstream, None
        assert lost is not None
        if not self._rosters:
            self.standing = Standing.JOINING
            return [e.FindContact()]
        self.standing, self._lost = Standing.SEEKING, lost
        self._tried = set()
        if not is_silent and lost != self.me:
            return self._support(lost)
        return self._support_next()

    def _is_hopeless_without(self, node: Node) -> bool:
        """The others are no majority, and too few to hold all slots were they one: waiting for a
        majority would only delay the news."""
        known = {x.member: x for roster in self._rosters for x in roster.members}
        others = [x for x in known.values() if x.node != node]
        ids = {x.member for x in others}
        if all(roster.is_quorum(ids) for roster in self._rosters):
            return False
        return assign_slots(self._settings.grid, others, {}, frozenset()) is None

    def _support_next(self) -> list[Action | StepDown]:
        """The next in the order of succession; the lost leader last. None left: the round is over
        and the next tick begins another."""
        lost = self._lost
        assert lost is not None
        if lost != self.me and self.end is None and self._is_hopeless_without(lost.node):
            reason = (
                f"node {lost.node}, which led, was lost, the rest is no majority, and no complete "
                "spare node is left; start the job again with more --spare-nodes"
            )
            return self._give_up(EXIT_MINORITY, reason)
        order = [x for x in self._rosters[-1].members if x.member != lost.member]
        order.append(lost)
        following = next((x for x in order if x.member not in self._tried), None)
        self.upstream = following
        return self._support(following) if following is not None else []

    def _support(self, following: Member) -> list[Action | StepDown]:
        self.upstream, self._age = following, 0
        self._answered = following == self.me
        self._tried.add(following.member)
        if following == self.me:
            return self._lead_when_supported()
        support = m.Support(member=self.me, promised=self.promised, end=self.end)
        return [e.ToLeader(leader=following, message=support)]

    def _tick(self, event: e.Tick) -> list[Action | StepDown]:
        bounds = self._settings.bounds
        self._age += 1
        self._respawns = [left - 1 for left in self._respawns if left > 1]
        self._forget_supporters()
        leads_nobody = (
            self.leader is not None
            and self.leader.phase in (Phase.ABORTING, Phase.ENDING)
            and not self.leader.is_lacking
        )
        if self.standing is not Standing.FOLLOWING or leads_nobody:
            self._waited += 1
        elif not self._rosters or self._rosters[-1].id.epoch == self.promised:
            self._waited = 0  # Not by an Abort alone: whoever sent it may reach no majority.
        actions: list[Action | StepDown] = []
        if self.standing is Standing.FOLLOWING:
            assert self.upstream is not None
            if self._age > bounds.silence:
                return self._seek(is_silent=True)
            actions = [e.ToLeader(leader=self.upstream, message=m.Heartbeat())]
            actions += self._send_back()
        elif self.standing is Standing.JOINING and self._waited > bounds.start:
            return self._give_up(EXIT_NO_JOB, "no job was found to join in time")
        elif self.standing is Standing.SEEKING:
            if self._waited > bounds.minority:
                reason = (
                    "this guardian could not reach a majority of its job for "
                    f"{bounds.minority} heartbeat intervals (--deadpool-minority-timeout)"
                )
                return self._give_up(EXIT_MINORITY, reason)
            if self.upstream is None:
                self._tried = set()
                actions = self._support_next()
            elif self._age > bounds.seek * (STAY if self._answered else 1):
                actions = self._support_next()
        if self.leader is not None:
            actions = [*actions, *self.leader.tick()]
        return actions

    def _send_back(self) -> list[Action | StepDown]:
        """The leader is there, and not only because its loss is not noticed yet: whoever has
        supported this guardian for a whole tick has lost a connection, not the leader."""
        patient = STAY * self._settings.bounds.seek - 2
        waiting = tuple(x for x in self._supporters if self._patience[x] <= patient)
        if self.leader is not None or self.upstream is None or self._age > 1 or not waiting:
            return []
        return [e.ToFollowers(members=waiting, message=m.NotLeader(leader=self.upstream))]

    def _forget_supporters(self) -> None:
        for supporter in list(self._supporters):
            self._patience[supporter] -= 1
            if self._patience[supporter] < 0:
                del self._supporters[supporter]

    def _give_up(self, exit_code: int, reason: str) -> list[Action | StepDown]:
        end = End(epoch=self.promised, exit_code=exit_code, reason=reason)
        return [e.StopTrainer(end=end), e.Exit(exit_code=exit_code, reason=reason)]

    # From the leader

    def _from_leader(self, event: e.FromLeader) -> list[Action | StepDown]:
        match event.message:
            case m.Abort(epoch=epoch) if (
                self.standing is Standing.SEEKING and epoch > self.promised
            ):
                # Of somebody that was supported before, and has its majority by now.
                known = (roster.find(event.sender) for roster in self._rosters)
                self.upstream = next(filter(None, known), self.upstream)
            case m.Heartbeat() if self._hears_again(event.sender):
                assert self._lost is not None
                return self._support(self._lost)
        if self.upstream is None or event.sender != self.upstream.member:
            return []
        if self.standing is not Standing.SEEKING:
            self._age = 0
        else:
            self._answered = True
        handler = _FROM_LEADER[self.standing].get(type(event.message))
        return handler(self, event.message) if handler is not None else []

    def _hears_again(self, sender: MemberId) -> bool:
        """This candidate has no majority, and the leader that it took for lost was silent only."""
        if self.standing is not Standing.SEEKING or self.upstream != self.me:
            return False
        return self._lost is not None and sender == self._lost.member != self.me.member

    def _welcome(self, message: m.Welcome) -> list[Action | StepDown]:
        self.standing, self._age = Standing.FOLLOWING, 0
        return []

    def _not_leader(self, message: m.NotLeader) -> list[Action | StepDown]:
        if message.leader is None or message.leader == self.upstream:
            self.upstream = None
            return [e.FindContact()]
        return self._join(message.leader)

    def _candidate_is(self, message: m.NotLeader) -> list[Action | StepDown]:
        """Of somebody that supports another, earlier in the succession: so this comes to an end."""
        if message.leader is None:
            return []
        return self._support(message.leader)

    def _enter_epoch(self, message: m.Abort) -> list[Action | StepDown]:
        if message.epoch <= self.promised:
            return []
        if self.end is not None:
            return self._give_up(EXIT_FENCED, "the job went on after this node was told its end")
        self.promised, self._promised_to = message.epoch, self.upstream
        self.standing, self._age = Standing.FOLLOWING, 0
        opens_store = self._opens_store = message.store_member == self.me.member
        if self.slot is None and not opens_store:
            return [e.CancelTransfers(), *self._answer_abort(0, frozenset())]
        return [e.AbortTrainer(epoch=self.promised, opens_store=opens_store)]

    def _trainer_aborted(self, event: e.TrainerAborted) -> list[Action | StepDown]:
        if event.epoch != self.promised:
            return []
        return self._answer_abort(event.store_port, event.own)

    def _answer_abort(self, port: int, own: frozenset[Iteration]) -> list[Action | StepDown]:
        if self.standing is not Standing.FOLLOWING or self._has_answered == self.promised:
            return []
        self._has_answered = self.promised
        rosters = self._rosters
        message = m.Aborted(
            epoch=self.promised,
            store_port=port,
            holdings=Holdings(own=own, replicas=self.shelf.holdings()),
            slot=self.slot,
            has_state=self.has_state,
            committed=self.committed,
            installed=self.installed.id if self.installed else None,
            accepted=rosters[-1].id if rosters else None,
        )
        told: list[m.Upstream] = [message]
        told += [self._failure] if self._failure else []
        told += [m.DrainWanted()] if self._drains else []
        return [action for each in told for action in self._tell(each)]

    def _tell(self, message: m.Upstream) -> list[Action | StepDown]:
        if self.standing is not Standing.FOLLOWING or self.upstream is None:
            return []
        return [e.ToLeader(leader=self.upstream, message=message)]

    def _roster_wanted(self, message: m.RosterWanted) -> list[Action | StepDown]:
        if message.epoch != self.promised or not self._rosters:
            return []
        answers = [m.RosterIs(epoch=self.promised, roster=roster) for roster in self._rosters]
        return [action for answer in answers for action in self._tell(answer)]

    def _take_proposal(self, message: m.Propose) -> list[Action | StepDown]:
        newest = self._rosters[-1].id if self._rosters else None
        if newest is None and message.base is None and message.id.epoch > self.promised:
            # A spare that came while this epoch trained: no Abort told it of it, and without its
            # vote a roster that counts it has a larger majority than there are voters.
            self.promised = message.id.epoch
        if message.id.epoch != self.promised or (newest is not None and message.id <= newest):
            return []
        roster = self._compose(message)
        if message.restart is not None and message.restart.restore is None:
            self.installed = roster  # The launch's: no other was in force before.
        else:
            self.accepted.append(roster)
        actions = self._tell(m.Accepted(roster=roster.id))
        if message.restart is not None and self.me.member in roster.slots:
            actions = self._adopt(message, roster) + actions
        return actions

    def _compose(self, message: m.Propose) -> Roster:
        return compose(message, self._rosters)

    def _adopt(self, message: m.Propose, roster: Roster) -> list[Action | StepDown]:
        assert message.restart is not None
        by_id = {x.member: x for x in roster.members}
        plan = Plan(
            epoch=self.promised,
            slots=tuple(by_id[member] for member in roster.slots),
            holders=self._holders,
            restart=message.restart,
        )
        slot = Slot(roster.slots.index(self.me.member))
        if self.slot not in (None, slot):
            raise ProtocolError(f"slot {slot} for a trainer built for {self.slot}")
        is_new = self.slot is None and self.me.member != plan.slots[plan.restart.store_slot].member
        self.plan, self.slot = plan, slot
        if plan.restart.restore is not None:
            self.committed = max(self.committed or plan.restart.restore, plan.restart.restore)
            self.shelf.forget_after(plan.restart.restore)
        source = dict(plan.restart.sources).get(slot)
        enter = [e.AbortTrainer(epoch=self.promised, opens_store=False)] if is_new else []
        adopt = e.AdoptPlan(
            plan=plan, slot=slot, source=by_id[source] if source is not None else None
        )
        return [*enter, adopt]

    def _resume(self, message: m.Resume) -> list[Action | StepDown]:
        newest = self._rosters[-1:]
        if message.epoch != self.promised or not newest or newest[0].id.epoch != message.epoch:
            return []
        self._install_up_to(newest[0])
        if self.plan is None or self.plan.epoch != self.promised or self.slot is None:
            return []
        if self._crashed_in == self.promised:
            return []  # The leader did not know. Its new trainer has not the state.
        self.has_state = True
        actions: list[Action | StepDown] = [e.ResumeTrainer(epoch=self.promised)]
        if self.plan.restart.restore is not None:
            # A holder that has it says so; a new one gets it.
            actions.append(self._put(self.plan.restart.restore))
        return actions

    def _install(self, message: m.Install) -> list[Action | StepDown]:
        roster = next((r for r in self.accepted if r.id == message.roster), None)
        if roster is not None:
            self._install_up_to(roster)
        return []

    def _install_up_to(self, roster: Roster) -> None:
        self.installed = roster
        self.accepted = [r for r in self.accepted if r.id > roster.id]

    def _committed(self, message: m.Committed) -> list[Action | StepDown]:
        if message.epoch != self.promised:
            return []
        self.committed = message.iteration
        return [e.TellCommitted(epoch=message.epoch, iteration=message.iteration)]

    def _drain(self, message: m.Drain) -> list[Action | StepDown]:
        return [e.DrainTrainer()]

    def _ended(self, message: m.Ended) -> list[Action | StepDown]:
        """Noting it is a promise, too: of one epoch, only to one leader."""
        epoch = message.end.epoch
        if epoch < self.promised or (epoch == self.promised and not self._may_note()):
            return []
        self.promised, self._promised_to = epoch, self.upstream
        self.standing, self._age = Standing.FOLLOWING, 0
        stop: list[Action | StepDown] = []
        if self.end is None:
            stop += self._keep(message.end)
            stop.append(e.StopTrainer(end=message.end))
        if self.end is None or message.end.epoch > self.end.epoch:
            self.end = message.end
        return [*stop, *self._tell(m.EndNoted())]

    def _keep(self, end: End) -> list[Action | StepDown]:
        if end.keep is None:
            return []
        own = [self.slot] if self.slot is not None and self.slot not in end.orphans else []
        held = {slot for slot, iteration in self.shelf.holdings() if iteration == end.keep}
        slots = [*own, *(slot for slot in end.orphans if slot in held)]
        return [e.KeepSnapshots(iteration=end.keep, slots=tuple(slots))] if slots else []

    def _may_note(self) -> bool:
        return self._promised_to in (None, self.upstream)

    def _leave(self, message: m.Leave) -> list[Action | StepDown]:
        if self.end is None:
            return []
        reason = self.end.reason if self.leader is not None else ""
        return [e.Exit(exit_code=self.end.exit_code, reason=reason)]

    def _fenced(self, message: m.Fenced) -> list[Action | StepDown]:
        return self._give_up(EXIT_FENCED, f"this node counts as lost: {message.reason}")

    # From the trainer, and from outside

    def _trainer_said(self, event: e.TrainerSaid) -> list[Action | StepDown]:
        if isinstance(event.message, m.Failed):
            self._failure = event.message
        return self._tell(event.message)

    def _trainer_died(self, event: e.TrainerDied) -> list[Action | StepDown]:
        if self.end is not None:
            return []
        if event.signal is None:
            failed = m.Failed(reason=event.reason, exit_code=event.exit_code or 1)
            return self._trainer_said(e.TrainerSaid(message=failed))
        kind = HUNG if self._killed else event.signal
        why, self._killed = self._killed or event.reason, ""
        if event.can_respawn and len(self._respawns) < self._settings.max_respawns:
            return self._respawn(kind, why)
        reason = f"this node counts as lost: {why}"
        lost = m.TrainerLost(reason=why)
        return [*self._tell(lost), *self._give_up(EXIT_FENCED, reason)]

    def _respawn(self, kind: str, reason: str) -> list[Action | StepDown]:
        """The slot stays, with its snapshots in this node's memory; the state is gone. Without a
        leader nobody is told: whoever comes to lead announces an epoch."""
        self._respawns.append(self._settings.respawn_window)
        self.has_state = False
        actions: list[Action | StepDown] = [e.CancelTransfers(), e.SpawnTrainer()]
        is_asked = self.slot is not None or self._opens_store
        if self._has_answered == self.promised:
            self._crashed_in = self.promised
        elif is_asked:
            abort = e.AbortTrainer(epoch=self.promised, opens_store=self._opens_store)
            actions.append(abort)
        crashed = m.TrainerCrashed(epoch=self.promised, kind=kind, reason=reason)
        return actions + self._tell(crashed)

    def _trainer_stalled(self, event: e.TrainerStalled) -> list[Action | StepDown]:
        """Whoever only waits for one that hangs leaves its collectives when an epoch is announced;
        the one that hangs does not."""
        if self.end is not None or self._killed:
            return []
        is_asked = self.slot is not None or self._opens_store
        if is_asked and self._has_answered < self.promised:
            self._killed = event.reason
            return [e.KillTrainer(reason=event.reason)]
        if self.plan is None or self.plan.epoch != self.promised:
            return []
        return self._tell(
            m.Faltered(
                epoch=self.promised,
                iteration=event.iteration,
                kind=STALLED,
                reason=event.reason,
            )
        )

    def _end_asked(self, event: e.EndAsked) -> list[Action | StepDown]:
        wanted = m.EndWanted(exit_code=event.exit_code, reason=event.reason)
        return self._tell(wanted) or self._give_up(event.exit_code, event.reason)

    def _drain_asked(self, event: e.DrainAsked) -> list[Action | StepDown]:
        self._drains = True
        return self._tell(m.DrainWanted())

    # Snapshots

    def _captured(self, event: e.Captured) -> list[Action | StepDown]:
        return [self._put(event.iteration)] if self._is_current(event.epoch) else []

    def _is_current(self, epoch: Epoch) -> bool:
        return epoch == self.promised and self.plan is not None and self.plan.epoch == epoch

    def _put(self, iteration: Iteration) -> e.Put:
        assert self.plan is not None and self.slot is not None
        return e.Put(
            epoch=self.promised,
            iteration=iteration,
            slot=self.slot,
            holders=tuple(self.plan.slots[holder] for holder in self.plan.holders[self.slot]),
        )

    def _put_done(self, event: e.PutDone) -> list[Action | StepDown]:
        if not self._is_current(event.epoch):
            return []
        return self._tell(m.Staged(epoch=event.epoch, iteration=event.iteration))

    def _fetch_failed(self, event: e.FetchFailed) -> list[Action | StepDown]:
        if not self._is_current(event.epoch):
            return []
        return self._tell(m.RegroupFailed(epoch=event.epoch, reason=event.reason))

    def _offered(self, event: e.Offered) -> list[Action | StepDown]:
        return [self.shelf.answer_offer(event, self.promised)]

    def _received(self, event: e.Received) -> list[Action | StepDown]:
        return [self.shelf.seal(event, self.promised)]

    def _asked(self, event: e.Asked) -> list[Action | StepDown]:
        return [self.shelf.answer_pull(event, self.promised)]

    def _damaged(self, event: e.Damaged) -> list[Action | StepDown]:
        """Not told at once: whoever needed it says that the epoch fails, and the answer to the
        next Abort is without it."""
        self.shelf.drop(event.slot, event.iteration)
        return []


_TABLE: dict[type, Callable[[Guardian, Any], list[Action | StepDown]]] = {
    e.Started: Guardian._started,
    e.Contact: Guardian._contact,
    e.FromFollower: Guardian._from_follower,
    e.FollowerGone: Guardian._follower_gone,
    e.FromLeader: Guardian._from_leader,
    e.LeaderGone: Guardian._leader_gone,
    e.Dead: Guardian._dead,
    e.Tick: Guardian._tick,
    e.TrainerAborted: Guardian._trainer_aborted,
    e.TrainerSaid: Guardian._trainer_said,
    e.TrainerDied: Guardian._trainer_died,
    e.TrainerStalled: Guardian._trainer_stalled,
    e.EndAsked: Guardian._end_asked,
    e.DrainAsked: Guardian._drain_asked,
    e.Captured: Guardian._captured,
    e.PutDone: Guardian._put_done,
    e.FetchFailed: Guardian._fetch_failed,
    e.Offered: Guardian._offered,
    e.Received: Guardian._received,
    e.Asked: Guardian._asked,
    e.Damaged: Guardian._damaged,
}

_Handler = Callable[[Guardian, Any], list[Action | StepDown]]

_ENDS: dict[type, _Handler] = {
    m.Ended: Guardian._ended,
    m.Leave: Guardian._leave,
    m.Fenced: Guardian._fenced,
}

_FROM_LEADER: dict[Standing, dict[type, _Handler]] = {
    Standing.JOINING: {
        **_ENDS,
        m.Welcome: Guardian._welcome,
        m.NotLeader: Guardian._not_leader,
    },
    Standing.FOLLOWING: {
        **_ENDS,
        m.Abort: Guardian._enter_epoch,
        m.RosterWanted: Guardian._roster_wanted,
        m.Propose: Guardian._take_proposal,
        m.Resume: Guardian._resume,
        m.Install: Guardian._install,
        m.Committed: Guardian._committed,
        m.Drain: Guardian._drain,
    },
    Standing.SEEKING: {
        **_ENDS,
        m.Welcome: Guardian._welcome,
        m.NotLeader: Guardian._candidate_is,
        m.Abort: Guardian._enter_epoch,
    },
    Standing.LEFT: {},
}
"""What is done with each message of the leader; others (a heartbeat, something that a candidate
says before it leads) have no effect beyond being heard."""
