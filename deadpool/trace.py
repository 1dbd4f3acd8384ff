"""The protocol's events and actions as JSON lines, and back.

One file a guardian. The first line says who it is and under which settings; each further line is
one call of its core: the event, what it asked for, and when. `tools/check_trace.py` replays it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from deadpool.protocol import events, messages
from deadpool.protocol.leader import Settings
from deadpool.protocol.types import Member

_TYPES: dict[str, type] = {
    cls.__name__: cls for union in (events.Event, events.Action) for cls in get_args(union)
}
_MESSAGES: dict[str, type] = {
    cls.__name__: cls
    for union in (messages.Upstream, messages.Downstream)
    for cls in get_args(union)
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a core."""

    monotonic_s: float
    event: events.Event
    actions: tuple[events.Action, ...]


class TraceWriter:
    """Appends to a file of its own; a line is written whole, so that a killed process leaves at
    most one torn line, its last."""

    def __init__(self, path: str, settings: Settings, me: Member) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write({"settings": settings, "me": me})

    def step(self, event: events.Event, actions: Sequence[events.Action]) -> None:
        self._write(
            {
                "t": time.monotonic(),
                "event": _tagged(event),
                "actions": [_tagged(action) for action in actions],
            }
        )

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, record: dict[str, Any]) -> None:
        os.write(self._descriptor, msgspec.json.encode(record) + b"\n")


def read_trace(path: str | Path) -> tuple[Settings, Member, Iterator[Step]]:
    """A trace from its file. Raises msgspec errors for what is none; a torn last line is left
    out."""
    lines = Path(path).read_bytes().split(b"\n")
    complete = lines[:-1]
    head = msgspec.json.decode(complete[0])
    settings = msgspec.convert(head["settings"], Settings)
    me = msgspec.convert(head["me"], Member)

    def steps() -> Iterator[Step]:
        for line in complete[1:]:
            record = msgspec.json.decode(line)
            yield Step(
                monotonic_s=record["t"],
                event=_untagged(record["event"]),
                actions=tuple(_untagged(action) for action in record["actions"]),
            )

    return settings, me, steps()


def _tagged(record: Any) -> dict[str, Any]:
    """{type: fields}, with a message inside treated alike."""
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    if "message" in fields:
        message = fields["message"]
        fields["message"] = {type(message).__name__: message}
    return {type(record).__name__: fields}


def _untagged(tagged: dict[str, Any]) -> Any:
    ((name, fields),) = tagged.items()
    if "message" in fields:
        ((kind, body),) = fields["message"].items()
        message: Any = msgspec.convert(body, _MESSAGES[kind])
        cls = _TYPES[name]
        hints = {k: v for k, v in get_type_hints(cls).items() if k != "message"}
        rest = {k: msgspec.convert(v, hints[k]) for k, v in fields.items() if k != "message"}
        return cls(**rest, message=message)
    return msgspec.convert(fields, _TYPES[name])
