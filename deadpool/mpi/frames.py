"""What a guardian and its sidecar say to each other: one packet a message, on a unix socket.

Descriptors of memory travel beside `Move`. Peers are slots, which are ranks of the MPI world.
"""

from __future__ import annotations

import hmac
import os
import shutil
import socket

import msgspec

from deadpool.messages import WireError
from deadpool.protocol.types import Epoch

MAX_PACKET_BYTES = 8 << 10
CHUNK_BYTES = 16 << 20
"""Of a payload in one MPI message, counted from the payload's start; both ends cut alike."""
MAX_IN_FLIGHT = 4
"""Messages of one payload."""

KEY_VARIABLE = "DEADPOOL_MPI_KEY"
SIDECAR_SAYS = "deadpool sidecar: "
"""Before what a sidecar prints, for its guardian to find among a launcher's words."""


class Say(msgspec.Struct, tag=True, frozen=True):
    """A message of `deadpool.messages`, about the replica of slot `owner`: to `peer` on the way
    down to the sidecar, from it on the way up."""

    peer: int
    owner: int
    body: bytes


class Move(msgspec.Struct, tag=True, frozen=True):
    """To the sidecar: send this part of a file to `peer`, or receive it, after earlier moves."""

    peer: int
    is_send: bool
    offset: int
    num_bytes: int


class Moved(msgspec.Struct, tag=True, frozen=True):
    """To the guardian: so many bytes more, in order."""

    peer: int
    is_send: bool
    num_bytes: int


class Up(msgspec.Struct, tag=True, frozen=True):
    """To the guardian: the world is whole, every sidecar has its guardian."""

    library: str
    session: str
    """Folder of the daemon that started the sidecar; empty where the library has none."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """To the guardian, before the sidecar ends."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Say | Move | Moved | Up | Failed)


def encode(frame: Say | Move | Moved | Up | Failed) -> bytes:
    data = _encoder.encode(frame)
    assert len(data) <= MAX_PACKET_BYTES, f"{type(frame).__name__}: {len(data)} bytes"
    return data


def decode(data: bytes) -> Say | Move | Moved | Up | Failed:
    """Raises WireError."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a frame of a sidecar: {error}") from error


def world_key(token: bytes, epoch: Epoch) -> bytes:
    """What guardians and sidecars of one epoch's world prove to each other. It goes through the
    MPI launcher's environment, which the job's token must not."""
    return hmac.digest(token, b"mpi world of epoch %d" % epoch, "sha256")


def address(key: bytes, slot: int) -> str:
    """Abstract, so that nothing is left in a file system: where the guardian of `slot` listens."""
    return "\0deadpool-" + hmac.digest(key, b"address of slot %d" % slot, "sha256").hex()[:32]


def segments(pid: int | str) -> set[str]:
    """Files under /dev/shm that a process has mapped and that have not been unlinked."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                name = line.rstrip("\n").partition("/dev/shm/")[2]
                if name and not name.endswith(" (deleted)"):
                    found.add("/dev/shm/" + name)
    except OSError:
        pass  # It has ended.
    return found


def sweep(paths: set[str]) -> None:
    """Unlink what an MPI library leaves when its process does not finalize."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            pass  # A neighbour that had it mapped, too, was first.


def sweep_session(folder: str) -> None:
    """Remove the session folder of an Open MPI daemon that was killed; a live one does itself."""
    name, _, pid = os.path.basename(folder).partition(".")
    if name in ("ompi", "prte") and pid.isdigit() and not _runs(pid):
        shutil.rmtree(folder, ignore_errors=True)


def _runs(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def packet_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
