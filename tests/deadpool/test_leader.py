"""The leader as a machine: events in, actions out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from deadpool.protocol.leader import (
    MAX_FAILED_REGROUPS,
    Aborted,
    Action,
    DeadlinePassed,
    EnterPhase,
    Failed,
    Fence,
    Finished,
    Joined,
    Leader,
    Lost,
    Ready,
    RegroupFailed,
    SendAbort,
    SendCommitted,
    SendEnd,
    SendPlan,
    SendResume,
    SetDeadline,
    Staged,
)
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import (
    Epoch,
    Holdings,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Plan,
    Slot,
)

NOTHING = Holdings(own=frozenset(), replicas=frozenset())


def grid(*, world_size: int = 4, ranks_per_node: int = 1, pipeline: int = 1) -> Grid:
    return Grid(
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        tensor=1,
        context=1,
        pipeline=pipeline,
        pipeline_before_data=False,
    )


def member(number: int, node: int, local_rank: int = 0) -> Member:
    return Member(
        member=MemberId(number),
        node=Node(node),
        local_rank=local_rank,
        host="127.0.0.1",
        data_port=10_000 + number,
    )


def only(actions: Iterable[Action], kind: type) -> list:
    return [action for action in actions if isinstance(action, kind)]


class Job:
    """A leader with members that answer as told. Member ids are node * 10 + local rank."""

    def __init__(self, parallel: Grid, num_spare_nodes: int) -> None:
        self.grid = parallel
        self.leader = Leader(grid=parallel, num_spare_nodes=num_spare_nodes)
        self.log: list[Action] = []
        for node in range(parallel.num_nodes + num_spare_nodes):
            self.join(node)

    def handle(self, event: object) -> list[Action]:
        actions = self.leader.handle(event)  # type: ignore[arg-type]
        self.log += actions
        return actions

    def join(self, node: int) -> list[Action]:
        actions: list[Action] = []
        for local_rank in range(self.grid.ranks_per_node):
            joining = member(node * 10 + local_rank, node, local_rank)
            actions += self.handle(Joined(member=joining))
        return actions

    def lose(self, number: int) -> list[Action]:
        return self.handle(Lost(member=MemberId(number), reason="its power went"))

    def holder_of(self, slot: int) -> MemberId:
        return self.leader.slots[Slot(slot)]

    def in_slots(self) -> list[MemberId]:
        return [self.leader.slots[slot] for slot in sorted(self.leader.slots)]

    def holdings(self, number: MemberId, iterations: Sequence[int]) -> Holdings:
        """What a member has that staged `iterations` and holds its ward's replicas."""
        slot = self.leader.slot_of(number)
        assert slot is not None and self.leader.plan is not None
        wards = [w for w, holder in enumerate(self.leader.plan.holders) if holder == slot]
        return Holdings(
            own=frozenset(map(Iteration, iterations)),
            replicas=frozenset((Slot(w), Iteration(i)) for w in wards for i in iterations),
        )

    def abort_all(self, fresh: Iterable[int] = (), iterations: Sequence[int] = (0,)) -> list:
        """Every slot's member has left its collectives; `fresh` ones hold nothing."""
        actions: list[Action] = []
        for number in self.in_slots():
            held = NOTHING if number in fresh else self.holdings(number, iterations)
            actions += self.aborted(number, held)
        return actions

    def aborted(self, number: MemberId, holdings: Holdings = NOTHING) -> list[Action]:
        return self.handle(
            Aborted(
                member=number,
                epoch=self.leader.epoch,
                store_port=40_000 + number,
                holdings=holdings,
            )
        )

    def ready_all(self) -> list[Action]:
        actions: list[Action] = []
        for number in self.in_slots():
            actions += self.handle(Ready(member=number, epoch=self.leader.epoch))
        return actions

    def stage_all(self, iteration: int) -> list[Action]:
        actions: list[Action] = []
        for number in self.in_slots():
            actions += self.stage(number, iteration)
        return actions

    def stage(self, number: MemberId, iteration: int) -> list[Action]:
        return self.handle(
            Staged(member=number, epoch=self.leader.epoch, iteration=Iteration(iteration))
        )

    def start_training(self) -> None:
        """The first epoch, and iteration 0 committed."""
        for number in self.in_slots():
            self.aborted(number)
        self.stage_all(0)
        self.ready_all()
        assert self.leader.phase is Phase.TRAINING and self.leader.committed == 0


def training_job(num_spare_nodes: int = 2, **sizes: int) -> Job:
    job = Job(grid(**sizes), num_spare_nodes)
    job.start_training()
    return job


def plan_in(actions: Iterable[Action]) -> Plan:
    (send,) = only(actions, SendPlan)
    return send.plan


# Forming


def test_forming_all_but_one_joined_waits() -> None:
    leader = Leader(grid=grid(), num_spare_nodes=1)
    for node in range(4):
        assert leader.handle(Joined(member=member(node, node))) == []
    assert leader.phase is Phase.FORMING


def test_forming_last_one_joined_opens_epoch_one_with_slots_in_node_order() -> None:
    leader = Leader(grid=grid(ranks_per_node=2), num_spare_nodes=1)
    comers = [(5, 2, 1), (3, 1, 1), (1, 0, 1), (4, 2, 0), (2, 1, 0)]
    for number, node, local_rank in comers:
        assert leader.handle(Joined(member=member(number, node, local_rank))) == []
    actions = leader.handle(Joined(member=member(0, 0, 0)))
    assert leader.slots == {0: 0, 1: 1, 2: 2, 3: 3}
    assert leader.spare_nodes == [2]
    assert actions == [
        EnterPhase(epoch=Epoch(1), phase=Phase.ABORTING),
        SendAbort(members=(0, 1, 2, 3), epoch=Epoch(1), store_member=MemberId(0)),
        SetDeadline(epoch=Epoch(1), phase=Phase.ABORTING),
    ]


def test_forming_member_lost_halts_naming_its_node() -> None:
    leader = Leader(grid=grid(), num_spare_nodes=1)
    leader.handle(Joined(member=member(7, 3)))
    (end,) = only(leader.handle(Lost(member=MemberId(7), reason="gone")), SendEnd)
    assert leader.phase is Phase.HALTED
    assert end.exit_code != 0 and "node 3" in end.reason


def test_forming_deadline_halts_saying_how_many_came() -> None:
    leader = Leader(grid=grid(), num_spare_nodes=1)
    leader.handle(Joined(member=member(0, 0)))
    (end,) = only(leader.handle(DeadlinePassed(epoch=Epoch(0), phase=Phase.FORMING)), SendEnd)
    assert "1 of 5" in end.reason and end.exit_code != 0 and end.members == (0,)


def test_first_epoch_plan_restores_nothing_and_names_the_store() -> None:
    job = Job(grid(), 1)
    for number in job.in_slots()[:-1]:
        assert job.aborted(number) == []
    plan = plan_in(job.aborted(job.in_slots()[-1]))
    assert plan.restore is None and plan.sources == ()
    assert (plan.store_slot, plan.store_port) == (0, 40_000)
    assert [m.member for m in plan.slots] == [0, 10, 20, 30]


def test_training_begins_only_when_every_slot_is_ready() -> None:
    job = Job(grid(), 1)
    for number in job.in_slots():
        job.aborted(number)
    *others, last = job.in_slots()
    for number in others:
        assert job.handle(Ready(member=number, epoch=Epoch(1))) == []
    actions = job.handle(Ready(member=last, epoch=Epoch(1)))
    assert only(actions, SendResume) == [SendResume(members=(0, 10, 20, 30), epoch=Epoch(1))]


def test_ready_twice_of_one_member_counts_once() -> None:
    job = Job(grid(), 1)
    for number in job.in_slots():
        job.aborted(number)
    for _ in range(4):
        assert job.handle(Ready(member=MemberId(0), epoch=Epoch(1))) == []
    assert job.leader.phase is Phase.REGROUPING


# Commits


def test_commit_three_of_four_staged_is_not_announced() -> None:
    job = training_job()
    *others, last = job.in_slots()
    for number in others:
        assert job.stage(number, 1) == []
    (committed,) = only(job.stage(last, 1), SendCommitted)
    assert committed.iteration == 1 and committed.members == tuple(job.in_slots())


def test_commit_of_the_first_snapshot_waits_for_every_slot() -> None:
    job = Job(grid(), 1)
    for number in job.in_slots():
        job.aborted(number)
    *others, last = job.in_slots()
    for number in others:
        assert job.stage(number, 0) == [] and job.leader.committed is None
    assert len(only(job.stage(last, 0), SendCommitted)) == 1


def test_commit_slots_apart_announces_the_least() -> None:
    job = training_job()
    first, *others = job.in_slots()
    job.stage(first, 1)
    job.stage(first, 2)
    announced = [c for number in others for c in only(job.stage(number, 1), SendCommitted)]
    assert [c.iteration for c in announced] == [1]


def test_commit_staged_again_is_not_announced_twice() -> None:
    job = training_job()
    job.stage_all(1)
    assert only(job.stage_all(1), SendCommitted) == []


def test_commit_of_the_restored_iteration_is_announced_anew_in_a_new_epoch() -> None:
    job = training_job()
    job.lose(10)
    job.abort_all(fresh=[40])
    job.ready_all()
    assert [c.iteration for c in only(job.stage_all(0), SendCommitted)] == [0]


# One loss


def test_loss_in_training_gives_the_slots_to_a_spare_in_a_new_epoch() -> None:
    job = training_job()
    actions = job.lose(10)
    assert only(actions, Fence) == [Fence(node=Node(1), reason="its power went")]
    assert job.in_slots() == [0, 40, 20, 30]
    assert only(actions, SendAbort) == [
        SendAbort(members=(0, 40, 20, 30), epoch=Epoch(2), store_member=MemberId(0))
    ]
    assert only(actions, SetDeadline) == [SetDeadline(epoch=Epoch(2), phase=Phase.ABORTING)]


def test_loss_replaced_slot_gets_its_source_and_nobody_else_does() -> None:
    job = training_job()
    job.stage_all(1)
    job.lose(10)
    plan = plan_in(job.abort_all(fresh=[40], iterations=[0, 1]))
    assert plan.replaced == (1,) and plan.restore == 1
    # The ring's next peer of slot 1 is slot 2.
    assert plan.sources == ((Slot(1), MemberId(20)),)
    assert plan.holders[1] == 2


def test_loss_of_slot_zero_puts_the_store_on_a_survivor() -> None:
    job = training_job()
    (abort,) = only(job.lose(0), SendAbort)
    assert abort.store_member == 10
    plan = plan_in(job.abort_all(fresh=[40]))
    assert (plan.store_slot, plan.store_port) == (1, 40_010)


def test_loss_of_a_node_of_two_ranks_moves_both_and_takes_news_of_the_second_as_known() -> None:
    job = training_job(ranks_per_node=2)
    (fence,) = only(job.lose(11), Fence)
    assert fence.node == 1
    assert job.in_slots() == [0, 1, 20, 21]
    assert job.lose(10) == []
    plan = plan_in(job.abort_all(fresh=[20, 21]))
    assert plan.replaced == (2, 3)


def test_loss_before_the_first_commit_halts_naming_the_node() -> None:
    job = Job(grid(), 1)
    (end,) = only(job.lose(20), SendEnd)
    assert end.exit_code != 0 and "node 2" in end.reason
    assert end.members == (0, 10, 30, 40)


# Losses close together and inside a recovery


def test_loss_second_while_aborting_opens_another_epoch_with_both_replaced() -> None:
    job = training_job()
    job.lose(10)
    job.aborted(MemberId(20), NOTHING)
    (abort,) = only(job.lose(30), SendAbort)
    assert abort.epoch == 3 and abort.members == (0, 40, 20, 50)
    assert job.leader.nodes_lost == [1, 3]
    # What was said in epoch 2 does not count: all four must answer.
    for number in (0, 40, 20):
        held = NOTHING if number == 40 else job.holdings(MemberId(number), [0])
        assert job.aborted(MemberId(number), held) == []
    plan = plan_in(job.aborted(MemberId(50), NOTHING))
    assert plan.replaced == (1, 3) and dict(plan.sources) == {1: 20, 3: 0}


@pytest.mark.parametrize("phase", [Phase.ABORTING, Phase.REGROUPING])
def test_loss_of_the_incoming_spare_gives_the_slot_to_the_next(phase: Phase) -> None:
    job = training_job()
    job.lose(10)
    if phase is Phase.REGROUPING:
        job.abort_all(fresh=[40])
    assert job.leader.phase is phase
    (abort,) = only(job.lose(40), SendAbort)
    assert abort.members == (0, 50, 20, 30) and abort.epoch == 3
    plan = plan_in(job.abort_all(fresh=[50]))
    assert plan.replaced == (1,) and dict(plan.sources) == {1: 20}


@pytest.mark.parametrize("phase", [Phase.ABORTING, Phase.REGROUPING])
def test_loss_of_the_store_slot_opens_the_store_on_another_survivor(phase: Phase) -> None:
    job = training_job()
    (abort,) = only(job.lose(20), SendAbort)
    assert abort.store_member == 0
    if phase is Phase.REGROUPING:
        job.abort_all(fresh=[40])
    (abort,) = only(job.lose(0), SendAbort)
    assert abort.store_member == 10
    plan = plan_in(job.abort_all(fresh=[40, 50]))
    assert (plan.store_slot, plan.store_port) == (1, 40_010)
    assert plan.replaced == (0, 2)


def test_loss_of_neighbours_leaving_no_copy_halts_and_says_what_to_type() -> None:
    job = training_job()
    job.lose(10)
    job.lose(20)
    (end,) = only(job.abort_all(fresh=[40, 50]), SendEnd)
    assert end.exit_code == 4 and "--load" in end.reason
    assert "1, 2" in end.reason


def test_restored_replacement_counts_as_survivor_of_the_next_loss() -> None:
    job = training_job()
    job.lose(0)
    job.abort_all(fresh=[40])
    job.ready_all()
    job.stage_all(0)
    (abort,) = only(job.lose(10), SendAbort)
    assert abort.store_member == 40
    assert plan_in(job.abort_all(fresh=[50])).replaced == (1,)


# Spares


def test_spare_lost_is_fenced_and_training_goes_on() -> None:
    job = training_job()
    assert job.lose(40) == [Fence(node=Node(4), reason="its power went")]
    assert job.leader.phase is Phase.TRAINING and job.leader.epoch == 1
    job.lose(10)
    assert job.holder_of(1) == 50


def test_spares_exhausted_halts_naming_the_node_and_the_flag() -> None:
    job = training_job(num_spare_nodes=1)
    job.lose(10)
    job.abort_all(fresh=[40])
    job.ready_all()
    job.stage_all(0)
    job.leader.forget_losses()
    (end,) = only(job.lose(20), SendEnd)
    assert end.exit_code == 3 and "node 2" in end.reason and "--spare-nodes" in end.reason


def test_spare_incomplete_is_not_used() -> None:
    job = training_job(num_spare_nodes=1, ranks_per_node=2)
    job.handle(Joined(member=member(70, 7, 0)))
    assert job.leader.spare_nodes == [2, 7]
    job.lose(20)
    (end,) = only(job.lose(0), SendEnd)
    assert end.exit_code == 3


def test_spare_that_joined_later_takes_a_slot() -> None:
    job = training_job(num_spare_nodes=1)
    job.lose(10)
    assert job.join(9) == []
    (abort,) = only(job.lose(20), SendAbort)
    assert abort.members == (0, 40, 90, 30)


def test_slots_through_many_losses_never_hold_one_member_twice() -> None:
    job = training_job(num_spare_nodes=2, ranks_per_node=2)
    next_node = 10
    for _ in range(20):
        victim = job.in_slots()[0]
        job.lose(victim)
        held = job.in_slots()
        assert len(held) == len(set(held)) == 4
        assert all(number in job.leader.members for number in held)
        fresh = [n for n in held if job.leader.slot_of(n) in (0, 1)]
        job.abort_all(fresh=fresh)
        job.ready_all()
        job.stage_all(0)
        job.join(next_node)
        next_node += 1
    assert job.leader.phase is Phase.TRAINING and job.leader.epoch == 21


# Messages that have no effect


def test_stale_messages_of_another_epoch_have_no_effect() -> None:
    job = training_job()
    job.lose(10)
    for epoch in (Epoch(1), Epoch(3)):
        for number in job.in_slots():
            stale = Aborted(member=number, epoch=epoch, store_port=1, holdings=NOTHING)
            assert job.handle(stale) == []
    job.abort_all(fresh=[40])
    for epoch in (Epoch(1), Epoch(3)):
        for number in job.in_slots():
            assert job.handle(Ready(member=number, epoch=epoch)) == []
            assert job.handle(RegroupFailed(member=number, epoch=epoch, reason="?")) == []
            assert job.handle(Staged(member=number, epoch=epoch, iteration=Iteration(9))) == []
    assert job.leader.phase is Phase.REGROUPING
    job.ready_all()
    for epoch in (Epoch(1), Epoch(3)):
        for number in job.in_slots():
            assert job.handle(Staged(member=number, epoch=epoch, iteration=Iteration(9))) == []
            assert job.handle(Finished(member=number, epoch=epoch)) == []
    assert job.leader.phase is Phase.TRAINING and job.leader.committed == 0


def test_messages_of_a_spare_have_no_effect() -> None:
    job = training_job()
    assert job.stage(MemberId(40), 5) == []
    job.lose(10)
    assert job.aborted(MemberId(50)) == []
    assert job.leader.phase is Phase.ABORTING and not job.leader._aborted


def test_messages_after_the_end_have_no_effect_and_comers_are_sent_home() -> None:
    job = training_job()
    job.leader.end(1, "enough")
    assert job.lose(10) == [] and job.stage_all(4) == [] and job.leader.end(2, "again") == []
    (end,) = job.handle(Joined(member=member(99, 9)))
    assert isinstance(end, SendEnd) and end.members == (99,)
    assert job.leader.phase is Phase.HALTED


# Failures and bounds


def test_regroup_failures_are_retried_then_halt() -> None:
    job = training_job()
    job.lose(10)
    for attempt in range(MAX_FAILED_REGROUPS + 1):
        job.abort_all(fresh=[40])
        actions = job.handle(
            RegroupFailed(member=MemberId(20), epoch=job.leader.epoch, reason="no route")
        )
        halted = bool(only(actions, SendEnd))
        assert halted == (attempt == MAX_FAILED_REGROUPS)
    (end,) = only(job.log, SendEnd)
    assert end.exit_code != 0 and "no route" in end.reason


def test_regroup_that_succeeds_resets_the_count_of_failures() -> None:
    job = training_job(num_spare_nodes=2)
    for victim, spare in ((10, 40), (20, 50)):
        job.lose(victim)
        for _ in range(MAX_FAILED_REGROUPS):
            job.abort_all(fresh=[spare])
            job.handle(RegroupFailed(member=MemberId(0), epoch=job.leader.epoch, reason="?"))
        job.abort_all(fresh=[spare])
        job.ready_all()
        job.stage_all(0)
    assert job.leader.phase is Phase.TRAINING


@pytest.mark.parametrize("phase", [Phase.ABORTING, Phase.REGROUPING])
def test_deadline_halts_naming_the_slots_that_did_not_answer(phase: Phase) -> None:
    job = training_job()
    job.lose(10)
    if phase is Phase.ABORTING:
        job.aborted(MemberId(0))
        job.aborted(MemberId(30))
    else:
        job.abort_all(fresh=[40])
        job.handle(Ready(member=MemberId(0), epoch=Epoch(2)))
        job.handle(Ready(member=MemberId(30), epoch=Epoch(2)))
    (end,) = only(job.handle(DeadlinePassed(epoch=Epoch(2), phase=phase)), SendEnd)
    assert end.reason.endswith("slots 1, 2") and phase.value in end.reason
    assert end.exit_code != 0


def test_deadline_of_a_passed_phase_or_epoch_has_no_effect() -> None:
    job = training_job()
    job.lose(10)
    assert job.handle(DeadlinePassed(epoch=Epoch(1), phase=Phase.ABORTING)) == []
    assert job.handle(DeadlinePassed(epoch=Epoch(2), phase=Phase.REGROUPING)) == []
    job.abort_all(fresh=[40])
    assert job.handle(DeadlinePassed(epoch=Epoch(2), phase=Phase.ABORTING)) == []
    job.ready_all()
    assert job.handle(DeadlinePassed(epoch=Epoch(2), phase=Phase.REGROUPING)) == []
    assert job.leader.phase is Phase.TRAINING


@pytest.mark.parametrize("phase", [Phase.ABORTING, Phase.REGROUPING])
def test_deadline_is_set_for_every_phase_of_a_recovery(phase: Phase) -> None:
    job = training_job()
    job.lose(10)
    job.abort_all(fresh=[40])
    assert SetDeadline(epoch=Epoch(2), phase=phase) in job.log


def test_failed_trainer_ends_the_job_with_its_code() -> None:
    job = training_job()
    (end,) = only(job.handle(Failed(member=MemberId(20), reason="NaN", exit_code=9)), SendEnd)
    assert end.exit_code == 9 and "node 2" in end.reason and "NaN" in end.reason


def test_failed_message_of_a_lost_member_has_no_effect() -> None:
    job = training_job()
    job.lose(20)
    assert job.handle(Failed(member=MemberId(20), reason="NaN", exit_code=9)) == []
    assert not job.leader.is_over


def test_finished_by_all_completes_with_zero_and_tells_spares_too() -> None:
    job = training_job()
    *others, last = job.in_slots()
    for number in others:
        assert job.handle(Finished(member=number, epoch=Epoch(1))) == []
    (end,) = only(job.handle(Finished(member=last, epoch=Epoch(1))), SendEnd)
    assert end == SendEnd(members=(0, 10, 20, 30, 40, 50), exit_code=0, reason="")
    assert job.leader.phase is Phase.COMPLETED


def test_finished_before_a_loss_is_asked_for_again() -> None:
    job = training_job()
    for number in job.in_slots()[:3]:
        job.handle(Finished(member=number, epoch=Epoch(1)))
    job.lose(30)
    job.abort_all(fresh=[40])
    job.ready_all()
    assert job.handle(Finished(member=MemberId(40), epoch=Epoch(2))) == []
    assert job.leader.phase is Phase.TRAINING


def test_pair_not_in_the_table_raises_naming_event_phase_and_epoch() -> None:
    leader = Leader(grid=grid(), num_spare_nodes=1)
    with pytest.raises(AssertionError, match="Ready in phase forming of epoch 0"):
        leader.handle(Ready(member=MemberId(0), epoch=Epoch(0)))
