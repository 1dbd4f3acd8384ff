"""Messages through every kind of connection, and what is none."""

from __future__ import annotations

import asyncio
import socket
import threading
import typing

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deadpool import messages as m
from deadpool.protocol.types import Epoch, Holdings, Iteration, Member, MemberId, Node, Plan, Slot
from deadpool.wire import BlockingLink, WireError, checked_length, parse_message, read_message

MEMBER = Member(member=MemberId(4), node=Node(1), local_rank=0, host="h\N{SNOWMAN}", data_port=9)
HOLDINGS = Holdings(
    own=frozenset({Iteration(7), Iteration(8)}),
    replicas=frozenset({(Slot(1), Iteration(7)), (Slot(3), Iteration(8))}),
)
PLAN = Plan(
    epoch=Epoch(3),
    slots=(MEMBER, MEMBER),
    replaced=(Slot(1),),
    restore=Iteration(7),
    sources=((Slot(1), MemberId(4)),),
    holders=(Slot(1), Slot(0)),
    store_slot=Slot(0),
    store_port=4711,
)
EXAMPLES: list[m.Message] = [
    m.Hello(token="t", node=0, local_rank=1, host="::1", data_port=65535),
    m.Aborted(epoch=Epoch(2), store_port=0, holdings=HOLDINGS),
    m.Ready(epoch=Epoch(2), seconds={"restore": 0.25}, num_bytes=1 << 40, iterations_rerun=1),
    m.RegroupFailed(epoch=Epoch(2), reason=""),
    m.Staged(epoch=Epoch(2), iteration=Iteration(9)),
    m.FirstStep(epoch=Epoch(2), iteration=Iteration(9), seconds=1e-9),
    m.Finished(epoch=Epoch(2)),
    m.Failed(reason="because", exit_code=4),
    m.TrainerLost(reason="signal 9"),
    m.Welcome(member=MemberId(5)),
    m.Abort(epoch=Epoch(2), opens_store=True),
    m.NewPlan(plan=PLAN),
    m.Resume(epoch=Epoch(2)),
    m.Committed(epoch=Epoch(2), iteration=Iteration(9)),
    m.Drain(),
    m.End(exit_code=3, reason="no spare"),
    m.TrainerUp(),
    m.ArenaLayout(payload_bytes=1 << 35),
    m.SnapshotWanted(epoch=Epoch(2), iteration=Iteration(9)),
    m.Captured(epoch=Epoch(2), iteration=Iteration(9), buffer=1),
    m.PlanForSlot(plan=PLAN, slot=Slot(1)),
    m.SnapshotHere(epoch=Epoch(2), iteration=Iteration(9), buffer=0, num_bytes=5, seconds=0.5),
    m.Offer(
        token="t",
        slot=Slot(1),
        epoch=Epoch(2),
        iteration=Iteration(9),
        num_bytes=1 << 35,
        checksum=(1 << 64) - 1,
    ),
    m.Pull(token="t", slot=Slot(1), iteration=Iteration(9)),
    m.Answer(wants_bytes=True, num_bytes=5, checksum=(1 << 64) - 1, refusal="no"),
]


def feed(data: bytes) -> m.AnyMessage:
    """`read_message` of a stream with these bytes and then its end."""

    async def read() -> m.AnyMessage:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    return asyncio.run(read())


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_examples_are_of_every_message_type() -> None:
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(m.AnyMessage))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_of_every_type_comes_back_equal(message: m.Message) -> None:
    assert feed(m.encode(message)) == message


def test_plan_comes_back_with_its_types() -> None:
    back = parse_message(m.encode(m.NewPlan(plan=PLAN))[4:])
    assert isinstance(back, m.NewPlan)
    assert isinstance(back.plan, Plan) and isinstance(back.plan.slots[0], Member)
    assert hash(back.plan) == hash(PLAN)


def test_message_longer_than_the_bound_is_refused_before_it_is_read() -> None:
    header = (m.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(WireError, match=str(m.MAX_MESSAGE_BYTES + 1)):
        checked_length(header)
    with pytest.raises(WireError):
        feed(header)
    assert checked_length(m.MAX_MESSAGE_BYTES.to_bytes(4, "little")) == m.MAX_MESSAGE_BYTES


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_cut_anywhere_raises_wire_error(message: m.Message) -> None:
    data = m.encode(message)
    for length in range(len(data)):
        with pytest.raises(WireError):
            feed(data[:length])


@given(st.binary(max_size=200))
@example(b"\x81\xa4type\xa1\xff")
@example(b"\xc1")
@example(b"\x81" * 10_000)
@example(b"\x91" * 10_000)
def test_garbage_as_a_body_raises_wire_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(WireError):
        feed(framed(body))


@settings(max_examples=600)
@given(st.sampled_from(EXAMPLES), st.data())
def test_message_with_bytes_changed_is_a_message_or_raises_wire_error(
    message: m.Message, data: st.DataObject
) -> None:
    body = bytearray(m.encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xC0, 0xC1, 0xCA, 0xDF, 0xFF]))
    try:
        back = parse_message(bytes(body))
    except WireError:
        return
    assert type(back) in typing.get_args(m.AnyMessage)


def test_message_with_a_text_that_is_no_text_raises_wire_error() -> None:
    body = m.encode(m.RegroupFailed(epoch=Epoch(1), reason="XXXX"))[4:].replace(
        b"XXXX", b"\xff" * 4
    )
    with pytest.raises(WireError):
        parse_message(body)


def test_message_with_an_unknown_field_or_tag_raises_wire_error() -> None:
    for record in (
        {"type": "Finished", "epoch": 1, "more": 2},
        {"type": "Nobody"},
        {"epoch": 1},
        {"type": "Finished", "epoch": "1"},
        {"type": "Finished"},
        [1, 2],
        None,
    ):
        with pytest.raises(WireError):
            parse_message(msgspec.msgpack.encode(record))


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


@pytest.mark.parametrize("sent", [b"", b"\x05", b"\x05\0\0\0ab", framed(b"\xc1")])
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
