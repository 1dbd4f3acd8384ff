"""The protocol's events and actions as JSON lines, and back.

One file a guardian. The first line says who it is and under which settings; each further line is
one call of its core: its number, when, the event, and what it asked for. Lines are written before
anything is carried out. `deadpool.conformance` replays and compares them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from deadpool.protocol import events, messages
from deadpool.protocol.leader import Settings
from deadpool.protocol.types import Member

logger = logging.getLogger(__name__)

_TYPES: dict[str, type] = {
    cls.__name__: cls for union in (events.Event, events.Action) for cls in get_args(union)
}
_MESSAGES: dict[str, type] = {
    cls.__name__: cls
    for union in (messages.Upstream, messages.Downstream)
    for cls in get_args(union)
}
_NAMES: dict[type, tuple[str, ...]] = {
    cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in _TYPES.values()
}
_HINTS: dict[type, dict[str, Any]] = {
    cls: {k: v for k, v in get_type_hints(cls).items() if k != "message"} for cls in _TYPES.values()
}
_MALFORMED = (msgspec.MsgspecError, LookupError, TypeError, ValueError)


class NoTrace(Exception):
    """A file is no trace; says which line and why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a core."""

    line: int
    """In the file, from 1; the head is line 1."""
    monotonic_s: float
    event: events.Event
    actions: tuple[events.Action, ...]


class TraceWriter:
    """Appends to a file of its own; a line is written whole, so that a killed process leaves at
    most one torn line, its last. A file that cannot be written any more ends the trace, not the
    job."""

    def __init__(self, path: str, settings: Settings, me: Member) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_lines = 0
        self._write({"settings": settings, "me": me})

    def step(self, event: events.Event, actions: Sequence[events.Action]) -> None:
        if self._descriptor < 0:
            return
        record = {
            "line": self._num_lines + 1,
            "t": time.monotonic(),
            "event": _tagged(event),
            "actions": [_tagged(action) for action in actions],
        }
        try:
            self._write(record)
        except OSError as error:
            logger.error("the trace ends here: %s: %s", self._path, error)
            self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, record: dict[str, Any]) -> None:
        rest = memoryview(msgspec.json.encode(record) + b"\n")
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._num_lines += 1


def read_trace(path: str | Path) -> tuple[Settings, Member, Iterator[Step]]:
    """A trace from its file; a torn last line is left out. Raises NoTrace, also from the iterator,
    and OSError."""
    complete = Path(path).read_bytes().split(b"\n")[:-1]
    try:
        head = msgspec.json.decode(complete[0])
        settings = msgspec.convert(head["settings"], Settings)
        me = msgspec.convert(head["me"], Member)
    except _MALFORMED as error:
        raise NoTrace(f"{path}: line 1 is no head of a trace: {error}") from error

    def steps() -> Iterator[Step]:
        for number, line in enumerate(complete[1:], start=2):
            try:
                yield _parse(line)
            except _MALFORMED as error:
                raise NoTrace(f"{path}: line {number} is no line of a trace: {error}") from error

    return settings, me, steps()


def _parse(line: bytes) -> Step:
    record = msgspec.json.decode(line)
    return Step(
        line=int(record["line"]),
        monotonic_s=float(record["t"]),
        event=_untagged(record["event"]),
        actions=tuple(_untagged(action) for action in record["actions"]),
    )


def _tagged(record: Any) -> dict[str, Any]:
    """{type: fields}, with a message inside treated alike."""
    fields = {name: getattr(record, name) for name in _NAMES[type(record)]}
    if "message" in fields:
        message = fields["message"]
        fields["message"] = {type(message).__name__: message}
    return {type(record).__name__: fields}


def _untagged(tagged: dict[str, Any]) -> Any:
    ((name, fields),) = tagged.items()
    cls = _TYPES[name]
    if "message" in fields:
        ((kind, body),) = fields["message"].items()
        message: Any = msgspec.convert(body, _MESSAGES[kind])
        hints = _HINTS[cls]
        rest = {k: msgspec.convert(v, hints[k]) for k, v in fields.items() if k != "message"}
        return cls(**rest, message=message)
    return msgspec.convert(fields, cls)
