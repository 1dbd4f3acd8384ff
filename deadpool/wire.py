"""Length-framed messages over asyncio streams, blocking sockets, and bytes as they come."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec

from deadpool.messages import MAX_MESSAGE_BYTES, Message, WireError, decode, encode

_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
)
"""Seconds of silence, seconds between probes, probes: a host that vanished is found in 25 s."""


def checked_length(header: bytes | bytearray, max_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Body length from a frame's 4-byte header. Raises WireError over `max_bytes`."""
    length = int.from_bytes(header, "little")
    if length > max_bytes:
        raise WireError(f"a message of {length} bytes, at most {max_bytes} are taken")
    return length


def parse_message(body: bytes | bytearray) -> Message:
    """Raises WireError for what is no message."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error


class FrameParser:
    """Frames from bytes that come in pieces; time is linear in the bytes however they are cut.

    max_bytes: of a body; the next `pop` goes by it.
    """

    __slots__ = ("_buffer", "_start", "max_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()
        self._start = 0

    def push(self, data: bytes) -> None:
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def pop(self) -> bytearray | None:
        """The next body; None until it is whole. Raises WireError for one that is too long, as
        soon as its length is known."""
        begin = self._start + 4
        if len(self._buffer) < begin:
            return None
        end = begin + checked_length(self._buffer[self._start : begin], self.max_bytes)
        if len(self._buffer) < end:
            return None
        self._start = end
        return self._buffer[begin:end]


async def read_message(reader: asyncio.StreamReader) -> Message:
    """The next message. Raises WireError at the end of the stream or for a malformed one."""
    try:
        header = await reader.readexactly(4)
        body = await reader.readexactly(checked_length(header))
    except WireError:
        raise
    except (asyncio.IncompleteReadError, OSError) as error:
        raise WireError("the connection ended") from error
    return parse_message(body)


def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queue a message; a broken connection shows at the reader."""
    if not writer.is_closing():
        writer.write(encode(message))


class BlockingLink:
    """One end of a connected stream socket, for code without an event loop.

    `send` may be called by any thread; `receive` by one.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Raises WireError when the peer is gone."""
        data = encode(message)
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError as error:
            raise WireError("the connection ended") from error

    def receive(self) -> Message:
        """Block for the next message. Raises WireError at the end of the stream."""
        header = self._receive_exactly(4)
        return parse_message(self._receive_exactly(checked_length(header)))

    def _receive_exactly(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise WireError("the connection ended") from error
            if count == 0:
                raise WireError("the connection ended")
            view = view[count:]
        return bytes(buffer)

    def close(self) -> None:
        """Wake a blocked `receive` and close."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The peer closed first.
        self._socket.close()


def tune(sock: socket.socket, *, unread_timeout_s: float | None = None) -> None:
    """TCP options of a connection between guardians: no delay, keepalive.

    unread_timeout_s: how long sent bytes may stay unacknowledged, or the peer's window closed.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if unread_timeout_s is not None:
        timeout_ms = int(unread_timeout_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def family_of(host: str) -> socket.AddressFamily:
    """Of an address; a name counts as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
