"""Proof, at the start of a connection, that both ends know the job's token.

    dialer                                     acceptor
    magic, version, nonce D          ------>
                                     <------   magic, version, nonce A, proof("acceptor")
    proof("dialer")                  ------>

proof(role) is HMAC-SHA256, keyed with the token, over version, role, purpose, nonce D and nonce A.
The token is never sent. Nonces are 32 random bytes, so that a recorded transcript proves nothing
again; the role in the proof, that a peer's own bytes sent back to it prove nothing; the purpose,
that a proof made for a control connection does not open a data connection.

What it gives: each end knows that, when the connection began, somebody with the token was at work
at its other end. What it does not: nothing is encrypted, and later bytes are not authenticated,
so who can change traffic on its way, or relays a handshake between two honest ends, is not kept
out. Whoever sees a proof can test guesses of the token: it must be random, of 16 bytes or more.
"""

from __future__ import annotations

import enum
import hmac
import logging
import secrets

_MAGIC = b"DEADPOOL"
_VERSION = b"\x01"
_PREFIX = _MAGIC + _VERSION
NONCE_BYTES = 32
PROOF_BYTES = 32
OPENING_BYTES = len(_PREFIX) + NONCE_BYTES
ANSWER_BYTES = len(_PREFIX) + NONCE_BYTES + PROOF_BYTES

HANDSHAKE_TIMEOUT_S = 5.0
"""Bound from the start of a connection until both ends have proved themselves."""

MAX_IN_HANDSHAKE = 256
"""Connections of strangers that one listener holds; more wait in the kernel's queue."""


class NotOfThisJob(Exception):
    """The other end has not proved that it knows the token. `str` of it is one of few texts."""


class Purpose(enum.Enum):
    """What a connection is for."""

    CONTROL = b"control"
    DATA = b"data"
    SIDECAR = b"sidecar"


class Dialer:
    """The end that connected. No I/O: send `opening`, feed what comes to `receive`, send what it
    returns; the handshake is over when `wanted` is 0."""

    def __init__(self, token: bytes, purpose: Purpose) -> None:
        self._token = token
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()
        self.opening = _PREFIX + self._nonce
        self.wanted = ANSWER_BYTES
        """Bytes that must still come."""
        self.rest = b""
        """What came after the handshake: none, since the acceptor waits for the proof."""

    def receive(self, data: bytes) -> bytes:
        """Returns what is to be sent. Raises NotOfThisJob."""
        assert self.wanted > 0, "the handshake is over"
        _check_fits(data, self.wanted)
        self._received += data
        self.wanted -= len(data)
        _check_prefix(self._received)
        if self.wanted:
            return b""
        nonce = bytes(self._received[len(_PREFIX) : OPENING_BYTES])
        nonces = (self._nonce, nonce)
        expected = _proof(self._token, b"acceptor", self._purpose, *nonces)
        _check_proof(expected, self._received[OPENING_BYTES:])
        return _proof(self._token, b"dialer", self._purpose, *nonces)


class Acceptor:
    """The end that was connected to. Otherwise as `Dialer`, without an opening."""

    def __init__(self, token: bytes, purpose: Purpose) -> None:
        self._token = token
        self._purpose = purpose
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()
        self._expected: bytes | None = None
        """The dialer's proof, once its nonce is here."""
        self.wanted = OPENING_BYTES
        self.rest = b""

    def receive(self, data: bytes) -> bytes:
        """Returns what is to be sent. Raises NotOfThisJob."""
        assert self.wanted > 0, "the handshake is over"
        if self._expected is None:
            _check_fits(data, self.wanted)
        taken, self.rest = data[: self.wanted], data[self.wanted :]
        self._received += taken
        self.wanted -= len(taken)
        if self._expected is None:
            _check_prefix(self._received)
            return b"" if self.wanted else self._answer()
        if not self.wanted:
            _check_proof(self._expected, self._received)
        return b""

    def _answer(self) -> bytes:
        nonces = (bytes(self._received[len(_PREFIX) :]), self._nonce)
        self._expected = _proof(self._token, b"dialer", self._purpose, *nonces)
        self._received.clear()
        self.wanted = PROOF_BYTES
        return _PREFIX + self._nonce + _proof(self._token, b"acceptor", self._purpose, *nonces)


class RefusalLog:
    """Says once per host and kind of reason that a connection was refused. At most 1,000 lines,
    whatever strangers do. One event loop."""

    MAX_LINES = 1000

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._said: set[tuple[str, str]] = set()

    def note(self, host: str, kind: str, detail: str = "") -> None:
        """kind: a text without what differs from case to case; that is `detail`."""
        if len(self._said) >= self.MAX_LINES or (host, kind) in self._said:
            return
        self._said.add((host, kind))
        text = f"{kind}: {detail}" if detail else kind
        self._logger.warning("refused a connection from %s: %s", host, text)


def _check_fits(data: bytes, wanted: int) -> None:
    if len(data) > wanted:
        raise NotOfThisJob("it sent more than a handshake has")


def _check_prefix(received: bytearray) -> None:
    if received[: len(_MAGIC)] != _MAGIC[: len(received)]:
        raise NotOfThisJob("it speaks another protocol")
    if received[len(_MAGIC) : len(_PREFIX)] != _VERSION[: max(0, len(received) - len(_MAGIC))]:
        raise NotOfThisJob("it speaks another version of the protocol")


def _check_proof(expected: bytes, received: bytes | bytearray) -> None:
    if not hmac.compare_digest(expected, bytes(received)):
        raise NotOfThisJob("it does not know this job's token")


def _proof(
    token: bytes, role: bytes, purpose: Purpose, dialer_nonce: bytes, acceptor_nonce: bytes
) -> bytes:
    # Nonces have a fixed length, roles and purposes no zero byte: no two inputs read the same.
    text = b"\0".join((_PREFIX, role, purpose.value, dialer_nonce + acceptor_nonce))
    return hmac.digest(token, text, "sha256")
