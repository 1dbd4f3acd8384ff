"""What a person reads. The processes of a job share one terminal, pipe or file."""

from __future__ import annotations

import sys
import traceback


def say(words: str, *, is_error: bool = False) -> None:
    """Write `words` and the end of the line to stdout, or to stderr, in one call to the system.

    `print` makes two calls where Python does not buffer its output (PYTHONUNBUFFERED, which job
    scripts often set), and another process's line can come between them. Any thread.
    """
    stream = sys.stderr if is_error else sys.stdout
    stream.write(f"{words}\n")
    stream.flush()


def say_error(error: BaseException) -> None:
    """Write `error` and where it came from to stderr, whole. Any thread."""
    say("".join(traceback.format_exception(error)).rstrip("\n"), is_error=True)
