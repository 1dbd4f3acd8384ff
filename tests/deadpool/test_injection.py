"""Faults on demand: what is understood, what is refused, and who is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from deadpool.injection import (
    Copy,
    Flip,
    Injection,
    InjectionPhase,
    Injector,
    append_json_line,
    parse_injection,
)


@pytest.mark.parametrize("phase", list(InjectionPhase))
def test_injection_of_every_phase_is_understood(phase: InjectionPhase) -> None:
    parsed = parse_injection(f"kill-node=12@iteration=345,phase={phase.value}")
    assert parsed == Injection(node=12, iteration=345, phase=phase)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "kill-node=1",
        "kill-node=1@iteration=7",
        "kill-node=1@phase=backward,iteration=7",
        "kill-node=-1@iteration=7,phase=backward",
        "kill-node=1@iteration=7.5,phase=backward",
        "kill-node=1@iteration=7,phase=backward,phase=forward",
        " kill-node=1@iteration=7,phase=backward",
        "kill-node=1@iteration=7,phase=",
        "stop-node=1@iteration=7,phase=backward",
    ],
)
def test_injection_malformed_is_refused_with_what_was_given_and_the_form(spec: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_injection(spec)
    said = str(refused.value)
    assert repr(spec) in said and "kill-node=NODE@iteration=ITERATION,phase=PHASE" in said


def test_injection_unknown_phase_is_refused_naming_those_that_exist() -> None:
    with pytest.raises(ValueError) as refused:
        parse_injection("kill-node=1@iteration=7,phase=backwards")
    said = str(refused.value)
    assert "'backwards'" in said
    assert all(phase in said for phase in "forward backward optimizer capture replicate".split())


def test_injection_iteration_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="iterations count from 1"):
        parse_injection("kill-node=1@iteration=0,phase=forward")


DUE = (
    Injection(node=1, iteration=7, phase=InjectionPhase.BACKWARD),
    Injection(node=2, iteration=8, phase=InjectionPhase.CAPTURE),
)


def test_injector_is_due_only_for_its_node_iteration_and_phase() -> None:
    injector = Injector(DUE, 1, None)
    due = {(i, phase) for i in range(12) for phase in InjectionPhase if injector.is_due(i, phase)}
    assert due == {(7, InjectionPhase.BACKWARD)}
    assert injector.is_due_in(InjectionPhase.BACKWARD)
    assert not injector.is_due_in(InjectionPhase.CAPTURE)


def test_injector_fired_out_of_turn_kills_nobody(tmp_path: Path) -> None:
    injector = Injector(DUE, 1, str(tmp_path))
    injector.fire(8, InjectionPhase.BACKWARD)
    injector.fire(7, InjectionPhase.FORWARD)
    injector.fire(8, InjectionPhase.CAPTURE)
    assert list(tmp_path.iterdir()) == []


def test_injector_due_kills_every_process_of_its_group_and_writes_when(tmp_path: Path) -> None:
    """In a group of its own: a parent that fires, and a child that waits."""
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setpgid(0, 0)
        os.close(read_end)
        if os.fork() == 0:
            signal.pause()
            os._exit(1)
        Injector(DUE, 1, str(tmp_path)).fire(7, InjectionPhase.BACKWARD)
        os._exit(1)
    os.close(write_end)
    _, status = os.waitpid(parent, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    # The pipe ends only when the child is dead too.
    assert os.read(read_end, 1) == b""
    os.close(read_end)
    (record,) = map(json.loads, (tmp_path / "injections.jsonl").read_text().splitlines())
    moment = record.pop("monotonic_s")
    assert record == {"node": 1, "iteration": 7, "phase": "backward"}
    assert isinstance(moment, float)


def test_json_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    children = []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            for line in range(200):
                append_json_line(str(path), {"writer": writer, "line": line, "filler": "x" * 300})
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for writer in range(4):
        assert [r["line"] for r in records if r["writer"] == writer] == list(range(200))


def test_flip_is_parsed_and_damages_one_bit_of_its_copy_once(tmp_path: Path) -> None:
    flip = parse_injection("flip-replica=1@iteration=7")
    assert flip == Flip(node=1, iteration=7, copy=Copy.REPLICA)
    injector = Injector((flip,), 1, str(tmp_path))
    payload = bytearray(5)
    injector.flip(Copy.SNAPSHOT, 7, memoryview(payload))
    injector.flip(Copy.REPLICA, 6, memoryview(payload))
    assert payload == bytes(5) and list(tmp_path.iterdir()) == []
    injector.flip(Copy.REPLICA, 7, memoryview(payload))
    assert payload == b"\0\0\1\0\0"
    injector.flip(Copy.REPLICA, 7, memoryview(payload))
    assert payload == b"\0\0\1\0\0"
    (line,) = (tmp_path / "injections.jsonl").read_text().splitlines()
    assert json.loads(line) == {"node": 1, "iteration": 7, "flip": "replica"}
