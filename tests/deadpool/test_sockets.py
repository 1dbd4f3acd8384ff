"""Connections cut from outside by descriptor, and those that must not be."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool.sockets import ConnectionSet, tcp_connections

HOSTS = ["127.0.0.1", "::1"]


class Pairs:
    """Connected pairs through one listener, all closed at the end."""

    def __init__(self, host: str) -> None:
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=self.family)
        self.port = self.listener.getsockname()[1]
        self._open: list[socket.socket] = [self.listener]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        ours = socket.socket(self.family)
        ours.connect(self.listener.getsockname())
        theirs, _ = self.listener.accept()
        self._open += [ours, theirs]
        return ours, theirs

    def close(self) -> None:
        for sock in self._open:
            sock.close()


@contextlib.contextmanager
def pairs_at(host: str) -> Iterator[Pairs]:
    try:
        pairs = Pairs(host)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    try:
        yield pairs
    finally:
        pairs.close()


def is_alive(pair: tuple[socket.socket, socket.socket]) -> bool:
    ours, theirs = pair
    try:
        ours.sendall(b"?")
        return theirs.recv(1) == b"?"
    except OSError:
        return False


def wait_asleep(thread: threading.Thread) -> None:
    """Until the thread sleeps in the kernel: it waits for bytes then."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    while stat.read_text().rsplit(")", 1)[1].split()[0] != "S":
        pass


@pytest.mark.parametrize("host", HOSTS)
def test_shutdown_wakes_a_blocked_receive(host: str) -> None:
    with pairs_at(host) as pairs:
        connections = ConnectionSet()
        ours, _ = pairs.connect()
        received: list[bytes] = []
        thread = threading.Thread(target=lambda: received.append(ours.recv(1)))
        thread.start()
        wait_asleep(thread)
        assert connections.shutdown() == 2  # Both ends are in this process.
        thread.join(60)
        assert not thread.is_alive() and received == [b""]


@pytest.mark.parametrize("host", HOSTS)
def test_shutdown_leaves_connections_from_before_and_listeners(host: str) -> None:
    with pairs_at(host) as pairs:
        before = pairs.connect()
        connections = ConnectionSet()
        during = pairs.connect()
        connections.shutdown()
        assert is_alive(before) and not is_alive(during)
        assert is_alive(pairs.connect())


def test_shutdown_after_freeze_leaves_connections_from_after_it() -> None:
    with pairs_at("127.0.0.1") as pairs:
        connections = ConnectionSet()
        during = pairs.connect()
        connections.freeze(except_port=0)
        after = pairs.connect()
        connections.shutdown()
        assert is_alive(after) and not is_alive(during)


def test_shutdown_after_freeze_leaves_the_stores_connections_from_both_sides() -> None:
    with pairs_at("127.0.0.1") as groups, pairs_at("127.0.0.1") as store:
        connections = ConnectionSet()
        of_groups, of_store = groups.connect(), store.connect()
        connections.freeze(except_port=store.port)
        assert connections.shutdown() == 2
        assert is_alive(of_store) and not is_alive(of_groups)


def test_shutdown_before_freeze_cuts_the_stores_connections_too() -> None:
    """A build that waits at the store must wake as well."""
    with pairs_at("127.0.0.1") as store:
        connections = ConnectionSet()
        of_store = store.connect()
        connections.shutdown()
        assert not is_alive(of_store)


def test_shutdown_does_not_touch_a_connection_that_took_a_cut_ones_descriptor() -> None:
    with pairs_at("127.0.0.1") as pairs:
        connections = ConnectionSet()
        ours, theirs = pairs.connect()
        connections.freeze(except_port=0)
        numbers = {ours.fileno(), theirs.fileno()}
        ours.close()
        theirs.close()
        successor = pairs.connect()
        assert {s.fileno() for s in successor} == numbers, "the numbers were meant to be reused"
        assert connections.shutdown() == 0
        assert is_alive(successor)


def test_shutdown_leaves_socket_pairs_and_datagrams_alone() -> None:
    connections = ConnectionSet()
    pair = socket.socketpair()
    with pair[0], pair[1], socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        datagram.bind(("127.0.0.1", 0))
        connections.shutdown()
        assert is_alive(pair)
        datagram.sendto(b"!", datagram.getsockname())
        assert datagram.recv(1) == b"!"


def test_shutdown_twice_or_after_the_peer_has_gone_is_harmless() -> None:
    with pairs_at("127.0.0.1") as pairs:
        connections = ConnectionSet()
        _, theirs = pairs.connect()
        connections.freeze(except_port=0)
        theirs.close()
        connections.shutdown()
        connections.shutdown()


def test_tcp_connections_listed_to_the_end_leave_no_descriptor() -> None:
    with pairs_at("127.0.0.1") as pairs:
        pairs.connect()
        before = len(os.listdir("/proc/self/fd"))
        inodes = {inode for inode, _ in tcp_connections()}
        assert len(inodes) >= 2
        assert os.fstat(pairs.listener.fileno()).st_ino not in inodes
        assert len(os.listdir("/proc/self/fd")) == before
