"""Small facts of Linux processes that more than one part needs."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends (prctl(2)).

    expected_parent: the parent's pid as known before the fork. Ends this process at once when the
    parent is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected_parent:
        os._exit(1)


def set_process_name(name: str) -> None:
    """What `ps -o comm` and `top` show, 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def exit_code_of(status: int) -> int:
    """A waitpid status as a shell shows it: 128 + signal for a killed process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def signal_of(status: int) -> str | None:
    """The name of the signal that a waitpid status tells of; None for an exit."""
    if not os.WIFSIGNALED(status):
        return None
    number = os.WTERMSIG(status)
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"  # The real-time ones between the two with a name.


def describe_exit(status: int) -> str:
    """In words."""
    name = signal_of(status)
    return f"signal {name}" if name else f"exit code {os.waitstatus_to_exitcode(status)}"
