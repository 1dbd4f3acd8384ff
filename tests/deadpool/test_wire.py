"""Messages through every kind of connection, and what is none."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deadpool import messages as m
from deadpool.protocol import types as t
from deadpool.protocol.types import Epoch, Iteration
from deadpool.wire import (
    BlockingLink,
    FrameParser,
    WireError,
    checked_length,
    parse_message,
    read_message,
)

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    str: st.text(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of that type, every field drawn, as far as MessagePack's integers reach."""
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint in SIMPLE:
        return SIMPLE[hint]
    arguments = [any_of(argument) for argument in typing.get_args(hint) if argument is not ...]
    origin = typing.get_origin(hint)
    if origin is tuple and ... in typing.get_args(hint):
        return st.lists(arguments[0], max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*arguments)
    if origin is frozenset:
        return st.frozensets(arguments[0], max_size=3)
    if origin is dict:
        return st.dictionaries(*arguments, max_size=3)
    if origin is not None:
        return st.one_of(*arguments)
    fields = typing.get_type_hints(hint)
    return st.builds(hint, **{name: any_of(field) for name, field in fields.items()})


MESSAGES = st.sampled_from(m.TYPES).flatmap(any_of)


def feed(data: bytes) -> m.Message:
    """`read_message` of a stream with these bytes and then its end."""

    async def read() -> m.Message:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    return asyncio.run(read())


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def body_of(message: m.Message) -> bytes:
    return m.encode(message)[4:]


def test_types_are_the_unions_members_each_once() -> None:
    assert len(set(m.TYPES)) == len(m.TYPES) <= 256
    assert set(m.TYPES) == set(typing.get_args(m.Message))


@pytest.mark.parametrize("kind", m.TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_message_of_every_type_comes_back_equal(kind: type, data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    back = parse_message(body_of(message))
    assert back == message and type(back) is kind


def test_plan_and_roster_come_back_with_their_types() -> None:
    member = t.Member(
        member=t.MemberId(4), node=t.Node(1), local_rank=0, host="h", control_port=8, data_port=9
    )
    restart = t.Restart(
        restore=Iteration(7),
        replaced=(t.Slot(1),),
        sources=((t.Slot(1), t.MemberId(4)),),
        store_slot=t.Slot(0),
        store_port=4711,
    )
    roster_id = t.RosterId(Epoch(3), 1)
    message = m.Propose(
        id=roster_id,
        leader=t.MemberId(4),
        base=t.RosterId(Epoch(2), 0),
        added=(member,),
        removed=(),
        slots=((t.Slot(1), t.MemberId(4)),),
        restart=restart,
    )
    back = parse_message(body_of(message))
    assert isinstance(back, m.Propose) and hash(back) == hash(message)
    assert isinstance(back.id, t.RosterId) and isinstance(back.base, t.RosterId)
    assert isinstance(back.restart, t.Restart) and isinstance(back.added[0], t.Member)
    holdings = t.Holdings(
        own=frozenset({Iteration(7)}), replicas=frozenset({(t.Slot(1), Iteration(7))})
    )
    aborted = m.Aborted(
        epoch=Epoch(3), store_port=0, holdings=holdings, slot=None, has_state=False,
        committed=None, installed=None, accepted=roster_id,
    )  # fmt: skip
    again = parse_message(body_of(aborted))
    assert isinstance(again, m.Aborted) and isinstance(again.holdings.own, frozenset)
    assert again.holdings == holdings and isinstance(again.accepted, t.RosterId)


def test_message_longer_than_the_bound_is_refused_before_it_is_read() -> None:
    header = (m.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(WireError, match=str(m.MAX_MESSAGE_BYTES + 1)):
        checked_length(header)
    with pytest.raises(WireError):
        feed(header)
    assert checked_length(m.MAX_MESSAGE_BYTES.to_bytes(4, "little")) == m.MAX_MESSAGE_BYTES


@settings(max_examples=60, deadline=None)
@given(MESSAGES, st.data())
def test_message_cut_anywhere_raises_wire_error(message: m.Message, data: st.DataObject) -> None:
    frame = m.encode(message)
    with pytest.raises(WireError):
        feed(frame[: data.draw(st.integers(0, len(frame) - 1))])


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\x80")
@example(b"\x01\x81\xa2zz" + b"\x91" * 100_000)
@example(bytes([len(m.TYPES)]) + b"\x80")
def test_garbage_as_a_body_is_a_message_or_raises_wire_error(body: bytes) -> None:
    try:
        back = feed(framed(body))
    except WireError:
        return
    assert type(back) in m.TYPES


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\x80", bytes([len(m.TYPES)]) + b"\x80", b"\x01\x81\xa2zz" + b"\x91" * 99_999],
    ids=["empty", "unknown-type", "next-type", "deep"],
)
def test_garbage_raises_wire_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(WireError):
        parse_message(body)


@settings(max_examples=150, deadline=None)
@given(MESSAGES, st.data())
def test_message_with_bytes_changed_is_a_message_or_raises_wire_error(
    message: m.Message, data: st.DataObject
) -> None:
    body = bytearray(body_of(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xC0, 0xC1, 0xCA, 0xDF, 0xFF]))
    try:
        back = parse_message(bytes(body))
    except WireError:
        return
    assert type(back) in m.TYPES


def test_message_with_a_text_that_is_no_text_raises_wire_error() -> None:
    body = body_of(m.RegroupFailed(epoch=Epoch(1), reason="XXXX")).replace(b"XXXX", b"\xff" * 4)
    with pytest.raises(WireError):
        parse_message(body)


@pytest.mark.parametrize("fields", [{"epoch": "1"}, {}, {"epoch": None}, [1], None, 7])
def test_message_with_fields_that_are_not_its_raises_wire_error(fields: Any) -> None:
    with pytest.raises(WireError):
        parse_message(body_of(m.Finished(epoch=Epoch(1)))[:1] + msgspec.msgpack.encode(fields))


# Bytes as they come


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=20), st.lists(st.integers(1, 40), min_size=1))
def test_frame_parser_however_bytes_are_cut_yields_the_same_frames(
    bodies: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(framed(body) for body in bodies)
    parser = FrameParser(50)
    found: list[bytes] = []
    place = 0
    for cut in itertools.cycle(cuts):
        if place >= len(stream):
            break
        parser.push(stream[place : place + cut])
        place += cut
        while (body := parser.pop()) is not None:
            found.append(bytes(body))
    assert found == bodies


def test_frame_parser_refuses_too_long_a_frame_once_its_length_is_here() -> None:
    parser = FrameParser(10)
    parser.push(framed(b"0123456789") + (11).to_bytes(4, "little"))
    assert parser.pop() == b"0123456789"
    with pytest.raises(WireError, match="11 bytes, at most 10"):
        parser.pop()


# Blocking sockets


def test_blocking_link_messages_arrive_in_order_from_several_threads() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = BlockingLink(ours), BlockingLink(theirs)
    num_each = 200

    def send(epoch: int) -> None:
        for iteration in range(num_each):
            sender.send(m.Staged(epoch=Epoch(epoch), iteration=Iteration(iteration)))

    threads = [threading.Thread(target=send, args=(epoch,)) for epoch in range(4)]
    for thread in threads:
        thread.start()
    received: dict[int, list[int]] = {}
    for _ in range(4 * num_each):
        message = receiver.receive()
        assert isinstance(message, m.Staged)
        received.setdefault(message.epoch, []).append(message.iteration)
    for thread in threads:
        thread.join()
    assert received == {epoch: list(range(num_each)) for epoch in range(4)}
    sender.close()
    receiver.close()


def test_blocking_link_larger_than_the_socket_buffer_comes_whole() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = BlockingLink(ours), BlockingLink(theirs)
    message = m.RegroupFailed(epoch=Epoch(1), reason="x" * 3_000_000)
    thread = threading.Thread(target=sender.send, args=(message,))
    thread.start()
    assert receiver.receive() == message
    thread.join()
    sender.close()
    receiver.close()


def test_blocking_link_closed_wakes_its_own_blocked_receive() -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(ours)
    outcome: list[BaseException] = []

    def receive() -> None:
        try:
            link.receive()
        except WireError as error:
            outcome.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    link.close()
    thread.join(60)
    assert not thread.is_alive() and len(outcome) == 1
    theirs.close()


@pytest.mark.parametrize("sent", [b"", b"\x05", b"\x05\0\0\0ab", framed(b"\x01\xc1")])
def test_blocking_link_peer_gone_or_garbage_raises_wire_error(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(ours)
    theirs.sendall(sent)
    theirs.close()
    with pytest.raises(WireError):
        link.receive()
    link.close()


def test_blocking_link_send_to_a_peer_that_is_gone_raises_wire_error() -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(ours)
    theirs.close()
    with pytest.raises(WireError):
        link.send(m.TrainerUp())
    link.close()
