"""Cutting a library's TCP connections from outside, by descriptor."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator


def tcp_connections() -> Iterator[tuple[int, socket.socket]]:
    """Inode and a duplicate of every connected TCP socket of this process (IPv4 and IPv6).

    The duplicate is closed when the caller takes the next one. It pins the socket: the original
    descriptor's number may be closed and reused meanwhile. Listeners are left out: shutting one
    down makes gloo's accept fail, which ends the process (torch 2.13).
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # Closed by its owner since the listing.
        with handle:
            if handle.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if handle.type != socket.SOCK_STREAM:
                continue
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            yield os.fstat(handle.fileno()).st_ino, handle


class ConnectionSet:
    """The TCP connections that appear between construction and `freeze`: those of one generation
    of process groups, and of their rendezvous store while they are being built.

    Connections from before are never touched, and after `freeze` only those seen by it.
    """

    def __init__(self) -> None:
        self._before = {inode for inode, _ in tcp_connections()}
        self._frozen: set[int] | None = None

    def freeze(self, *, except_port: int) -> None:
        """Close the set. `except_port`: the store's; connections from and to it leave the set,
        since the store outlives the build."""
        self._frozen = {
            inode
            for inode, handle in tcp_connections()
            if inode not in self._before and except_port not in _ports(handle)
        }

    def shutdown(self) -> int:
        """Shut every connection of the set down, both ways; returns how many."""
        num_cut = 0
        for inode, handle in tcp_connections():
            if inode in self._before or (self._frozen is not None and inode not in self._frozen):
                continue
            try:
                handle.shutdown(socket.SHUT_RDWR)
                num_cut += 1
            except OSError:
                continue  # Its peer has reset it already.
        return num_cut


def _ports(handle: socket.socket) -> set[int]:
    ports = {handle.getsockname()[1]}
    try:
        ports.add(handle.getpeername()[1])
    except OSError:
        pass  # Its peer has reset it.
    return ports
