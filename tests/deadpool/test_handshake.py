"""Who proves to know the token, and who does not."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool.handshake import Acceptor, Dialer, NotOfThisJob, Purpose, RefusalLog

TOKEN = b"0123456789abcdef"


def pair(
    dialer_token: bytes = TOKEN,
    acceptor_token: bytes = TOKEN,
    dialer_purpose: Purpose = Purpose.CONTROL,
) -> tuple[Dialer, Acceptor]:
    return Dialer(dialer_token, dialer_purpose), Acceptor(acceptor_token, Purpose.CONTROL)


def test_handshake_between_two_of_the_job_is_over_after_three_messages() -> None:
    dialer, acceptor = pair()
    answer = acceptor.receive(dialer.opening)
    proof = dialer.receive(answer)
    assert dialer.wanted == 0 and acceptor.wanted == len(proof)
    assert acceptor.receive(proof) == b"" and acceptor.wanted == 0
    assert TOKEN not in dialer.opening + answer + proof


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_handshake_in_pieces_ends_alike_and_hands_on_what_follows(data: st.DataObject) -> None:
    dialer, acceptor = pair()
    follows = data.draw(st.binary(max_size=10))

    def in_pieces(side: Dialer | Acceptor, text: bytes) -> bytes:
        replies = b""
        while text and side.wanted:
            size = data.draw(st.integers(1, len(text)))
            replies += side.receive(text[:size])
            text = text[size:]
        return replies + text

    proof = in_pieces(dialer, in_pieces(acceptor, dialer.opening))
    leftover = in_pieces(acceptor, proof + follows)
    assert dialer.wanted == acceptor.wanted == 0
    assert acceptor.rest + leftover == follows and dialer.rest == b""


@pytest.mark.parametrize("other", [b"", b"another job's", TOKEN[:-1], TOKEN + b"x"])
def test_wrong_token_fails_at_the_dialer(other: bytes) -> None:
    dialer, acceptor = pair(acceptor_token=other)
    with pytest.raises(NotOfThisJob, match="token"):
        dialer.receive(acceptor.receive(dialer.opening))


def test_wrong_token_fails_at_the_acceptor() -> None:
    liar, acceptor = pair(dialer_token=b"another job's")
    answer = acceptor.receive(liar.opening)
    with pytest.raises(NotOfThisJob):
        liar.receive(answer)
    with pytest.raises(NotOfThisJob, match="token"):
        acceptor.receive(b"\0" * acceptor.wanted)


def test_proof_of_another_purpose_fails() -> None:
    dialer, acceptor = pair(dialer_purpose=Purpose.DATA)
    with pytest.raises(NotOfThisJob, match="token"):
        dialer.receive(acceptor.receive(dialer.opening))


def test_recorded_transcript_played_again_fails_at_either_end() -> None:
    dialer, acceptor = pair()
    answer = acceptor.receive(dialer.opening)
    proof = dialer.receive(answer)
    acceptor.receive(proof)
    again, other = Acceptor(TOKEN, Purpose.CONTROL), Dialer(TOKEN, Purpose.CONTROL)
    again.receive(dialer.opening)
    with pytest.raises(NotOfThisJob, match="token"):
        again.receive(proof)
    with pytest.raises(NotOfThisJob, match="token"):
        other.receive(answer)


def test_reflected_messages_fail_at_either_end() -> None:
    dialer = Dialer(TOKEN, Purpose.CONTROL)
    # Its own nonce, and the only proof that it would ever make, for roles the wrong way round.
    helper = Acceptor(TOKEN, Purpose.CONTROL)
    answer = helper.receive(dialer.opening)
    with pytest.raises(NotOfThisJob, match="token"):
        Dialer(TOKEN, Purpose.CONTROL).receive(dialer.opening + answer[len(dialer.opening) :])
    acceptor = Acceptor(TOKEN, Purpose.CONTROL)
    given_back = acceptor.receive(dialer.opening)
    with pytest.raises(NotOfThisJob, match="token"):
        acceptor.receive(given_back[-acceptor.wanted :])


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"\0", b"DEADPOOM"])
def test_another_protocol_is_refused_by_its_first_bytes(opening: bytes) -> None:
    for side in pair():
        with pytest.raises(NotOfThisJob, match="another protocol"):
            side.receive(opening)


def test_another_version_is_refused_naming_it() -> None:
    for side in pair():
        with pytest.raises(NotOfThisJob, match="another version"):
            side.receive(b"DEADPOOL\x02")


def test_more_than_a_handshake_is_refused_before_it_is_kept() -> None:
    dialer, acceptor = pair()
    with pytest.raises(NotOfThisJob, match="more than"):
        Acceptor(TOKEN, Purpose.CONTROL).receive(dialer.opening + b"x" * 1_000_000)
    with pytest.raises(NotOfThisJob, match="more than"):
        dialer.receive(acceptor.receive(dialer.opening) + b"x")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 104), st.integers(1, 255))
def test_answer_with_any_byte_changed_fails(place: int, change: int) -> None:
    dialer, acceptor = pair()
    answer = bytearray(acceptor.receive(dialer.opening))
    answer[place % len(answer)] ^= change
    with pytest.raises(NotOfThisJob):
        dialer.receive(bytes(answer))


def test_cut_handshake_still_wants_what_is_missing() -> None:
    dialer, acceptor = pair()
    answer = acceptor.receive(dialer.opening)
    assert dialer.receive(answer[:-1]) == b"" and dialer.wanted == 1
    assert acceptor.receive(b"x") == b"" and acceptor.wanted == 31


def test_refusals_are_said_once_per_host_and_kind_and_never_without_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RefusalLog(logging.getLogger("test"))
    for detail in ("a", "b"):
        log.note("h", "kind", detail)
    log.note("h", "other kind")
    assert [record.getMessage() for record in caplog.records] == [
        "refused a connection from h: kind: a",
        "refused a connection from h: other kind",
    ]
    for host in range(3 * RefusalLog.MAX_LINES):
        log.note(str(host), "kind")
    assert len(caplog.records) == RefusalLog.MAX_LINES
    assert len(log._said) == RefusalLog.MAX_LINES
