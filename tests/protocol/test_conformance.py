"""Traces: what is written comes back, what a job leaves agrees, what was tampered with is found."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool.conformance import check, load
from deadpool.protocol import events as e
from deadpool.protocol import leader as leading
from deadpool.protocol import messages as m
from deadpool.protocol.ballot import Ballot
from deadpool.protocol.guardian import Guardian
from deadpool.protocol.placement import Grid
from deadpool.protocol.types import Iteration, MemberId, Node
from deadpool.simulation.scale import Cluster
from deadpool.trace import TraceWriter, read_trace
from tools import check_trace

Files = dict[str, list[dict[str, Any]]]
"""Each file's lines, by its name."""

GRID = Grid(
    world_size=4, ranks_per_node=2, tensor=1, context=1, pipeline=2, pipeline_before_data=True
)

st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**62), 2**62))

RECORDS = [*typing.get_args(e.Event), *typing.get_args(e.Action)]


def record_traces(folder: Path, *, num_spares: int = 2, grid: Grid = GRID) -> Cluster:
    """A job that loses a node with slots, then its leader, and ends well."""
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[MemberId, TraceWriter] = {}

    def observe(member: MemberId, event: e.Event, actions: Any) -> None:
        if member not in writers:
            path = folder / f"protocol-{member}.jsonl"
            writers[member] = TraceWriter(str(path), cluster.settings, cluster.cores[member].me)
        writers[member].step(event, actions)

    cluster = Cluster(grid, num_spares, observe=observe)
    cluster.form()
    for iteration in (1, 2, 3):
        cluster.train(Iteration(iteration))
        cluster.tick()
    cluster.lose(Node(1))
    cluster.train(Iteration(4))
    cluster.join()
    cluster.tick()
    cluster.lose(cluster.leader.me.node)
    cluster.train(Iteration(5))
    cluster.tick()
    cluster.finish()
    for writer in writers.values():
        writer.close()
    return cluster


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    record_traces(folder)
    return folder


def read(folder: Path) -> Files:
    return {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted(folder.glob("*.jsonl"))
    }


def violations_of(files: Files, folder: Path, *, renumber: bool = True) -> list[str]:
    for name, lines in files.items():
        for number, line in enumerate(lines[1:], start=2):
            if renumber:
                line["line"] = number
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text)
    return [str(violation) for violation in check(load([folder]))[0]]


def places(files: Files, kind: str, message: str = "") -> Iterator[tuple[str, int]]:
    """File and index of lines with such an event."""
    for name, lines in files.items():
        for index, line in enumerate(lines[1:], start=1):
            fields = line["event"].get(kind)
            if fields is not None and (not message or message in fields["message"]):
                yield name, index


# What is written comes back


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_event_and_action_comes_back_as_it_was(
    kind: type, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("round-trip")
    cluster = Cluster(GRID)
    paths = iter(range(10_000))

    @settings(max_examples=20, deadline=None)
    @given(st.from_type(kind))
    def round_trip(record: Any) -> None:
        path = folder / str(next(paths))
        event, actions = (record, []) if kind in typing.get_args(e.Event) else (e.Tick(), [record])
        (me,) = [core.me for core in Cluster(GRID)._add(Node(0))][:1]
        writer = TraceWriter(str(path), cluster.settings, me)
        writer.step(event, actions)
        writer.close()
        found_settings, found_me, steps = read_trace(path)
        (step,) = steps
        assert (found_settings, found_me) == (cluster.settings, me)
        assert (step.line, step.event, step.actions) == (2, event, tuple(actions))

    round_trip()


# What a job leaves


def test_traces_of_a_job_with_two_losses_agree(clean: Path, capsys: Any) -> None:
    assert check_trace.main([str(clean)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "10 guardians (4 cut off)" in line and "3 epochs trained" in line
    assert "exit codes 0" in line


def test_torn_last_line_of_a_killed_guardian_is_left_out(clean: Path, tmp_path: Path) -> None:
    files = read(clean)
    name = next(n for n, lines in files.items() if "Exit" not in json.dumps(lines[-1]["actions"]))
    assert not violations_of(files, tmp_path)
    with open(tmp_path / name, "a") as file:
        file.write('{"line": 99, "t"')
    assert not check(load([tmp_path]))[0]


def test_lost_tail_is_believed_only_where_a_host_may_have_lost_it(
    clean: Path, tmp_path: Path
) -> None:
    files = read(clean)
    # The second leader's trace, which is whole, and the first one's, which was killed.
    name = next(
        n for n, i in places(files, "Started") if files[n][i]["event"]["Started"]["forms_job"]
    )
    files[name] = files[name][:-20]
    assert any("not sent so" in text for text in violations_of(files, tmp_path))
    assert not check(load([tmp_path]), tails_lost=True)[0]
    assert check_trace.main([str(tmp_path)]) == 1
    assert check_trace.main([str(tmp_path), "--tails-lost"]) == 0


@pytest.mark.parametrize("text", [b"", b"{}\n", b"\x00\xff\n", b'{"settings": {}, "me": 3}\n'])
def test_no_trace_ends_with_two(text: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "protocol-0-0-1.jsonl").write_bytes(text)
    assert check_trace.main([str(tmp_path)]) == 2
    assert "line 1 is no head of a trace" in capsys.readouterr().err


def test_line_that_is_none_ends_with_two(clean: Path, tmp_path: Path, capsys: Any) -> None:
    file = next(clean.glob("*.jsonl"))
    lines = file.read_bytes().splitlines(keepends=True)
    (tmp_path / file.name).write_bytes(b"".join([*lines[:5], b'{"event": 3}\n', *lines[6:]]))
    assert check_trace.main([str(tmp_path)]) == 2
    assert "line 6 is no line of a trace" in capsys.readouterr().err
    assert check_trace.main([str(tmp_path / "nowhere")]) == 2


# Tampered by hand


def test_changed_action_is_found_with_its_line(clean: Path, tmp_path: Path) -> None:
    files = read(clean)
    name, index = list(places(files, "PutDone"))[5]
    (action,) = files[name][index]["actions"]
    action["ToLeader"]["message"]["Staged"]["iteration"] += 1
    (text,) = violations_of(files, tmp_path)
    assert text.startswith(f"{name}:{index + 1}: PutDone(")
    assert "in the trace: ToLeader(" in text and "by the core:  ToLeader(" in text


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_dropped_line_is_found(
    clean: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    files = read(clean)
    name = data.draw(st.sampled_from(sorted(files)))
    index = data.draw(st.integers(1, len(files[name]) - 2))
    del files[name][index]
    folder = tmp_path_factory.mktemp("dropped")
    (text, *_) = violations_of(files, folder, renumber=False)
    assert text.startswith(f"{name}:{index + 1}: line {index + 2} stands here")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("FromFollower", "Heartbeat"), ("FromLeader", "Heartbeat"), ("Tick", ""),
     ("FromFollower", "Accepted"), ("FromLeader", "Committed"), ("FromLeader", "Propose")],
)  # fmt: skip
def test_dropped_line_whose_number_was_forged_is_found(
    clean: Path, tmp_path: Path, kind: str, message: str
) -> None:
    files = read(clean)
    name, index = list(places(files, kind, message))[2]
    del files[name][index]
    assert violations_of(files, tmp_path)


def test_invented_message_is_found(clean: Path, tmp_path: Path) -> None:
    files = read(clean)
    name, index = list(places(files, "FromLeader", "Heartbeat"))[1]
    files[name].insert(index, json.loads(json.dumps(files[name][index])))
    (text,) = violations_of(files, tmp_path)
    assert "Heartbeat() was taken, but not sent so in" in text


def test_message_of_nobody_is_found(clean: Path, tmp_path: Path) -> None:
    files = read(clean)
    name, index = list(places(files, "FromFollower", "Heartbeat"))[1]
    line = json.loads(json.dumps(files[name][index]))
    line["event"]["FromFollower"]["sender"] = 7
    files[name].insert(index, line)
    (text,) = violations_of(files, tmp_path)
    assert "member 7, who said this, left no trace" in text


def test_second_plan_of_an_epoch_is_found(clean: Path, tmp_path: Path) -> None:
    files = read(clean)
    for name, index in places(files, "FromLeader", "Propose"):
        line = files[name][index]
        restart = line["event"]["FromLeader"]["message"]["Propose"]["restart"]
        adopts = [a["AdoptPlan"] for a in line["actions"] if "AdoptPlan" in a]
        if restart is not None and restart["restore"] is not None and adopts:
            restart["store_port"] += 1
            adopts[0]["plan"]["restart"]["store_port"] += 1
            break
    found = violations_of(files, tmp_path)
    assert any(f"{name}:{index + 1}" in text or "another plan" in text for text in found)
    assert any("another plan of epoch 2" in text for text in found)


# Cores with bugs, which repeat themselves faithfully


def buggy_violations(folder: Path, **job: Any) -> str:
    record_traces(folder, **job)
    found, _ = check(load([folder]))
    return "\n".join(map(str, found))


def test_resume_without_a_quorum_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell = Guardian._tell

    def tell_without(self: Guardian, message: m.Upstream) -> Any:
        is_dropped = isinstance(message, m.Accepted) and self.slot is None
        return [] if is_dropped else tell(self, message)

    monkeypatch.setattr(Guardian, "_tell", tell_without)
    monkeypatch.setattr(Ballot, "is_passed", property(lambda self: True))
    text = buggy_violations(tmp_path, num_spares=5)
    assert "no quorum of roster 1.0" in text


def test_commit_said_twice_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = leading.Leader._take_staged

    def twice(self: Any, sender: MemberId, message: m.Staged) -> Any:
        return take(self, sender, message) * 2

    monkeypatch.setitem(leading._WHILE_RUNNING, m.Staged, twice)
    monkeypatch.setitem(leading._TABLE[leading.Phase.TRAINING], m.Staged, twice)
    assert "1 is committed after 1 in epoch 1" in buggy_violations(tmp_path)


def test_going_back_too_far_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose: Callable[..., Any] = leading.choose_restore_point

    def choose_older(*args: Any) -> Any:
        iteration, sources = choose(*args)
        return Iteration(iteration - 2), sources

    monkeypatch.setattr(leading, "choose_restore_point", choose_older)
    text = buggy_violations(tmp_path)
    assert "epoch 2 goes back to 1 from 3" in text
    assert "epoch 2 goes back to 1, 3 was committed" in text


def test_two_ends_of_one_job_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Guardian._leave

    def leave_otherwise(self: Guardian, message: m.Leave) -> Any:
        actions = leave(self, message)
        return [e.Exit(exit_code=5, reason="")] if actions and self.me.node == 2 else actions

    monkeypatch.setattr(Guardian, "_leave", leave_otherwise)
    from deadpool.protocol import guardian

    for table in guardian._FROM_LEADER.values():
        if m.Leave in table:
            monkeypatch.setitem(table, m.Leave, leave_otherwise)
    assert "ends with" in buggy_violations(tmp_path)
