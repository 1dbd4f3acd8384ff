"""A line is one call to the system, also where Python does not buffer its output."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

SAYS = {
    "deadpool": "from deadpool.terminal import say; say('a\\nb')",
    "deadpool, an error": "from deadpool.terminal import say; say('a\\nb', is_error=True)",
    "megatron": "from megatron.training.output import print_line; print_line('a\\nb')",
}


@pytest.mark.parametrize("code", SAYS.values(), ids=SAYS.keys())
def test_line_is_one_call(code):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # Keeps writes apart.
    ours.settimeout(1)
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-u", "-c", code],
            stdout=theirs,
            stderr=theirs,
            cwd=REPOSITORY,
            timeout=120,
            check=True,
        )
        assert ours.recv(1000) == b"a\nb\n"
