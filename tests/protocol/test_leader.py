"""The leading part and the guardian around it, fed by hand where a world would hide the detail."""

from __future__ import annotations

import typing

import pytest

from deadpool.protocol import events as e
from deadpool.protocol import guardian, leader
from deadpool.protocol import messages as m
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.leader import MAX_FAILED_REGROUPS, Leader
from deadpool.protocol.types import (
    NON_FINITE,
    Epoch,
    Iteration,
    Member,
    MemberId,
    Node,
    Phase,
    Standing,
)
from deadpool.simulation.search import run_quietly
from deadpool.simulation.world import World, small_grid

UPSTREAM = typing.get_args(m.Upstream)
DOWNSTREAM = typing.get_args(m.Downstream)


def lead_by(world: World) -> Leader:
    ((_, leads),) = world.leaders()
    return leads  # type: ignore[no-any-return]


def training(num_nodes: int = 3, num_spares: int = 1, **sizes: int) -> World:
    world = World(grid=small_grid(num_nodes, **sizes), num_spare_nodes=num_spares, last=50)
    return run_quietly(world, lambda w: bool(w.history.commits))


def until(world: World, phase: Phase, epoch: int) -> Leader:
    def reached(world: World) -> bool:
        return any(x.phase is phase and x.epoch == epoch for _, x in world.leaders())

    return lead_by(run_quietly(world, reached))


def told(world: World, sender: int, message: m.Upstream) -> list[object]:
    return list(lead_by(world).handle(MemberId(sender), message))


def only(actions: list[object], kind: type) -> list[typing.Any]:
    return [
        a.message for a in actions if isinstance(a, e.ToFollowers) and isinstance(a.message, kind)
    ]


# Tables


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("kind", UPSTREAM, ids=lambda kind: kind.__name__)
def test_table_has_every_pair_of_phase_and_message(phase: Phase, kind: type) -> None:
    assert kind in leader._TABLE[phase]


def test_table_of_a_guardian_has_every_event() -> None:
    assert set(guardian._TABLE) == set(typing.get_args(e.Event))


def test_table_of_standings_takes_each_message_of_a_leader_somewhere() -> None:
    assert set(guardian._FROM_LEADER) == set(Standing)
    taken = {kind for table in guardian._FROM_LEADER.values() for kind in table}
    assert taken | {m.Heartbeat} == set(DOWNSTREAM)
    assert not guardian._FROM_LEADER[Standing.LEFT]


# Commits


def test_commit_is_announced_when_the_last_slot_has_staged() -> None:
    world = training()
    leads = lead_by(world)
    now, newest = leads.epoch, leads.committed
    assert newest is not None
    nxt = Iteration(newest + 7)
    staged = m.Staged(epoch=now, iteration=nxt)
    assert not only(told(world, 0, staged), m.Committed)
    assert not only(told(world, 0, staged), m.Committed)  # Twice is once.
    assert not only(told(world, 1, staged), m.Committed)
    assert not only(told(world, 3, staged), m.Committed)  # A spare.
    (committed,) = only(told(world, 2, staged), m.Committed)
    assert committed == m.Committed(epoch=now, iteration=nxt)


def test_messages_of_another_epoch_have_no_effect() -> None:
    world = training()
    for epoch in (Epoch(0), Epoch(2)):
        for member in range(3):
            assert told(world, member, m.Staged(epoch=epoch, iteration=Iteration(9))) == []
            assert told(world, member, m.Finished(epoch=epoch)) == []
    assert lead_by(world).phase is Phase.TRAINING


# Losses


def test_loss_of_a_slot_gives_it_to_the_spare_and_names_its_source() -> None:
    world = training()
    world.crash([MemberId(1)])
    leads = until(world, Phase.TRAINING, 2)
    assert leads._roster is not None and leads._roster.slots == (0, 3, 2)
    restart = world.history.plans[Epoch(2)].restart
    assert restart.replaced == (1,) and restart.sources == ((1, 2),)
    assert leads.nodes_lost == [1]


def test_loss_of_the_leader_is_led_by_the_next_in_succession() -> None:
    world = training()
    world.crash([MemberId(0)])
    leads = until(world, Phase.TRAINING, 2)
    assert leads._me.member == 1
    assert world.history.plans[Epoch(2)].slots[0].member == 3
    assert world.history.plans[Epoch(2)].restart.store_slot != 0


def test_loss_of_a_spare_changes_the_roster_and_no_epoch() -> None:
    world = training(num_spares=2)
    world.crash([MemberId(3)])
    run_quietly(world, lambda w: w.history.in_force == (1, 1))
    leads = lead_by(world)
    assert leads.epoch == 1 and [x.member for x in leads._roster.members] == [0, 1, 2, 4]  # type: ignore[union-attr]


def test_loss_of_one_rank_loses_its_node() -> None:
    world = training(num_nodes=3, ranks_per_node=2)
    world.crash([MemberId(3)])
    leads = until(world, Phase.TRAINING, 2)
    assert leads._roster is not None and leads._roster.slots == (0, 1, 6, 7, 4, 5)
    assert world.history.exits[MemberId(2)] == 72


@pytest.mark.parametrize(("phase", "epoch"), [(Phase.ABORTING, 2), (Phase.REGROUPING, 3)])
def test_loss_of_the_incoming_spare_gives_the_slot_to_the_next(phase: Phase, epoch: int) -> None:
    world = training(num_spares=2)
    world.crash([MemberId(1)])
    until(world, phase, 2)
    world.crash([MemberId(3)])
    leads = until(world, Phase.TRAINING, epoch)
    assert leads._roster is not None and leads._roster.slots == (0, 4, 2)


def test_losses_without_a_spare_end_naming_the_node_and_the_flag() -> None:
    world = training(num_spares=0)
    world.crash([MemberId(1)])
    leads = until(world, Phase.ENDING, 2)
    assert leads.end is not None and leads.end.exit_code == 3
    assert "node 1" in leads.end.reason and "--spare-nodes" in leads.end.reason


def test_losses_of_neighbours_end_and_say_what_to_type() -> None:
    world = training(num_nodes=5, num_spares=2)
    world.crash([MemberId(1), MemberId(2)])
    run_quietly(world, lambda w: any(x.end for _, x in w.leaders()))
    end = lead_by(world).end
    assert end is not None and end.exit_code == 4 and "--load" in end.reason
    assert "1, 2" in end.reason


# Joining


def test_join_of_a_late_node_makes_it_a_spare() -> None:
    world = training(num_spares=0)
    late = world.start(Node(9), 0)
    assert world.answer_contact(late, [MemberId(2)])
    run_quietly(world, lambda w: w.processes[late].core.installed is not None)
    world.crash([MemberId(1)])
    leads = until(world, Phase.TRAINING, 2)
    assert leads._roster is not None and leads._roster.slots == (0, late, 2)


def test_join_under_the_name_of_a_live_node_is_refused() -> None:
    world = training()
    twin = world.start(Node(1), 0)
    assert world.answer_contact(twin, [MemberId(2)])
    run_quietly(world, lambda w: twin not in w.processes)
    assert world.history.exits[twin] == 72
    assert lead_by(world).epoch == 1


# Bounds and ends


def test_regroup_failures_are_retried_then_end() -> None:
    world = training()
    world.regroup_failures_left = MAX_FAILED_REGROUPS + 1
    leads = lead_by(world)
    for attempt in range(MAX_FAILED_REGROUPS + 1):
        leads.phase = Phase.REGROUPING
        told(world, 1, m.RegroupFailed(epoch=leads.epoch, reason="no route"))
        assert (leads.end is not None) == (attempt == MAX_FAILED_REGROUPS)
    assert leads.end is not None and "no route" in leads.end.reason


def test_regroup_failure_while_it_trains_begins_an_epoch_and_a_commit_clears_the_count() -> None:
    """A snapshot that is brought to a new holder may turn out to be damaged."""
    world = training()
    for epoch in range(1, 2 * MAX_FAILED_REGROUPS):
        ((leader_, leads),) = world.leaders()
        failed = m.RegroupFailed(epoch=Epoch(epoch), reason="a damaged snapshot")
        world.handle(leader_, e.FromFollower(sender=MemberId(1), message=failed))
        assert (leads.phase, leads.epoch, leads.end) == (Phase.ABORTING, epoch + 1, None)
        world = run_quietly(world, lambda w, new=epoch + 1: new in w.history.commits)
        assert lead_by(world).phase is Phase.TRAINING


def falter(world: World, member: int, iteration: int, kind: str = "ValueError") -> World:
    """A trainer errs; and the epoch that follows trains."""
    ((leader_, leads),) = world.leaders()
    faltered = m.Faltered(
        epoch=leads.epoch, iteration=Iteration(iteration), kind=kind, reason="no such file"
    )
    world.handle(leader_, e.FromFollower(sender=MemberId(member), message=faltered))
    new = leads.epoch
    return run_quietly(world, lambda w: new in w.history.commits or not w.processes)


def test_error_is_mended_once_and_the_same_again_ends_the_job_with_it() -> None:
    world = falter(training(), 2, 4)
    assert lead_by(world).epoch == 2 and lead_by(world).nodes_lost == []
    world = falter(falter(world, 2, 4, kind="KeyError"), 2, 5)
    assert lead_by(world).epoch == 4
    world = run_quietly(falter(world, 1, 5), World.is_over)
    assert set(world.history.exits.values()) == {1}


def test_error_that_comes_again_after_a_loss_is_mended_again() -> None:
    """The first may have been the lost node's."""
    world = falter(training(), 2, 4)
    world.crash([MemberId(1)])
    until(world, Phase.TRAINING, 3)
    world = falter(world, 2, 4)
    assert lead_by(world).phase is Phase.TRAINING and lead_by(world).epoch == 4


def test_corruption_is_suspected_once_the_iteration_is_committed_without_it() -> None:
    world = falter(training(), 2, 9, kind=NON_FINITE)

    def suspected(iteration: int) -> list[e.SuspectCorruption]:
        staged = m.Staged(epoch=Epoch(2), iteration=Iteration(iteration))
        told_ = [action for slot in range(3) for action in told(world, slot, staged)]
        return [action for action in told_ if isinstance(action, e.SuspectCorruption)]

    assert suspected(8) == []
    assert [(x.node, x.iteration) for x in suspected(9)] == [(2, 9)]
    assert suspected(10) == []


def test_error_of_an_earlier_epoch_has_no_effect() -> None:
    """Its rank has gone back with the others."""
    late = m.Faltered(epoch=Epoch(1), iteration=Iteration(4), kind="ValueError", reason="?")
    world = falter(training(), 2, 4)
    assert told(world, 2, late) == [] and lead_by(world).phase is Phase.TRAINING


def test_failed_trainer_ends_the_job_with_its_code_and_cause() -> None:
    world = training()
    told(world, 2, m.Failed(reason="NaN", exit_code=9))
    end = lead_by(world).end
    assert end is not None and end.exit_code == 9
    assert "node 2" in end.reason and "NaN" in end.reason


def test_end_is_left_only_when_a_majority_has_noted_it() -> None:
    world = training(num_nodes=3, num_spares=0)
    told(world, 0, m.EndWanted(exit_code=1, reason="enough"))
    leads = lead_by(world)
    assert not only(list(leads.gone(MemberId(1), "reset")), m.Leave)
    assert not only(list(leads.gone(MemberId(2), "reset")), m.Leave)
    assert not only(told(world, 0, m.EndNoted()), m.Leave)
    assert leads.phase is Phase.ENDING


def test_forming_too_long_ends_saying_how_many_came() -> None:
    world = World(grid=small_grid(2), num_spare_nodes=1, last=1)
    world.crash([MemberId(2)])
    run_quietly(world, lambda w: any(x.end for _, x in w.leaders()))
    end = lead_by(world).end
    assert end is not None and "2 of 3" in end.reason


def test_sender_that_is_no_member_has_no_effect() -> None:
    world = training()
    assert told(world, 77, m.Failed(reason="?", exit_code=9)) == []


def test_guardian_that_has_left_does_nothing() -> None:
    world = training()
    core = world.processes[MemberId(3)].core
    core.handle(e.EndAsked(exit_code=1, reason="?"))
    core.standing = Standing.LEFT
    assert core.handle(e.Tick()) == []


def test_guardian_alone_looks_for_a_contact() -> None:
    me = Member(
        member=MemberId(1), node=Node(0), local_rank=0, host="", control_port=0, data_port=0
    )
    core = Guardian(training().settings, me)
    assert core.handle(e.Started(forms_job=False)) == [e.FindContact()]
