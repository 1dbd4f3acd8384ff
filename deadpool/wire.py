"""Length-framed messages over asyncio streams and over blocking sockets."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec

from deadpool.messages import MAX_MESSAGE_BYTES, AnyMessage, Message, decode, encode


class WireError(ConnectionError):
    """The peer is gone or speaks something else; the connection is of no more use."""


def checked_length(header: bytes) -> int:
    """Body length from a frame's 4-byte header. Raises WireError over MAX_MESSAGE_BYTES."""
    length = int.from_bytes(header, "little")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} are taken")
    return length


def parse_message(body: bytes) -> AnyMessage:
    """Raises WireError for what is no message."""
    try:
        return decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of this protocol: {error}") from error


async def read_message(reader: asyncio.StreamReader) -> AnyMessage:
    """The next message. Raises WireError at the end of the stream or for a malformed one."""
    try:
        header = await reader.readexactly(4)
        body = await reader.readexactly(checked_length(header))
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

    def receive(self) -> AnyMessage:
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
