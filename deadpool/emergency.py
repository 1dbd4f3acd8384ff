"""Snapshots on disk, for a job that ends for want of a node.

`SAVE/deadpool-emergency/iter_0000007/` holds a file for each slot, as the slot's memory was, and
one with what it sums to.

A guardian writes, off its event loop; the trainers of a later job with the same grid read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re

from deadpool.integrity import Manifest, checksum, chunks
from deadpool.protocol.types import Iteration, Slot

_FOLDER = "deadpool-emergency"


class Unreadable(Exception):
    """What is wrong with which file."""


def folder_of(directory: str, iteration: Iteration) -> str:
    return os.path.join(directory, _FOLDER, f"iter_{iteration:07d}")


def _paths(directory: str, iteration: Iteration, slot: Slot) -> tuple[str, str]:
    base = os.path.join(folder_of(directory, iteration), f"slot_{slot:05d}")
    return f"{base}.snapshot", f"{base}.json"


def _write(directory: str, manifest: Manifest, payload: memoryview, world_size: int) -> None:
    data, sums = _paths(directory, manifest.iteration, manifest.slot)
    os.makedirs(os.path.dirname(data), exist_ok=True)
    record = json.dumps({**dataclasses.asdict(manifest), "world_size": world_size}).encode()
    for path, content in ((data, payload), (sums, memoryview(record))):
        # Several holders may write the same slot: whoever is last leaves the same bytes.
        own = f"{path}.{os.uname().nodename}-{os.getpid()}"
        try:
            with open(own, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(own, path)
        except BaseException:
            if os.path.exists(own):
                os.unlink(own)
            raise


async def write(directory: str, manifest: Manifest, payload: memoryview, world_size: int) -> None:
    """payload: [manifest.num_bytes] uint8 that lies still. Raises OSError."""
    await asyncio.get_running_loop().run_in_executor(
        None, _write, directory, manifest, payload, world_size
    )


def newest(directory: str, world_size: int) -> Iteration | None:
    """The newest iteration of which every slot is there, written by a job of as many ranks."""
    try:
        names = os.listdir(os.path.join(directory, _FOLDER))
    except OSError:
        return None
    iterations = [Iteration(int(name[5:])) for name in names if re.fullmatch(r"iter_\d{7,}", name)]
    for iteration in sorted(iterations, reverse=True):
        if all(_is_whole(directory, iteration, Slot(s), world_size) for s in range(world_size)):
            return iteration
    return None


def _is_whole(directory: str, iteration: Iteration, slot: Slot, world_size: int) -> bool:
    data, _ = _paths(directory, iteration, slot)
    try:
        manifest, size = _manifest(directory, iteration, slot)
        return size == world_size and os.path.getsize(data) == manifest.num_bytes
    except (OSError, Unreadable):
        return False


def _manifest(directory: str, iteration: Iteration, slot: Slot) -> tuple[Manifest, int]:
    """And the number of ranks. Raises OSError or Unreadable."""
    _, path = _paths(directory, iteration, slot)
    with open(path, encoding="utf-8") as file:
        try:
            record = json.load(file)
            world_size = int(record.pop("world_size"))
            return Manifest(**{**record, "sums": tuple(record["sums"])}), world_size
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unreadable(f"{path} cannot be read: {error!r}") from error


def read(directory: str, iteration: Iteration, slot: Slot, payload: memoryview) -> None:
    """Into `payload`, [num_bytes] uint8. Raises OSError, or Unreadable where the file is damaged or
    does not fit the model that was built."""
    manifest, _ = _manifest(directory, iteration, slot)
    path, _ = _paths(directory, iteration, slot)
    if manifest.num_bytes != len(payload):
        raise Unreadable(
            f"{path} has {manifest.num_bytes} bytes, the model built here takes {len(payload)}: it "
            "is of another model or grid"
        )
    with open(path, "rb") as file:
        length = file.readinto(payload)
    if length != len(payload):
        raise Unreadable(f"{path} ends after {length} of {len(payload)} bytes")
    flaw = manifest.flaw(slot, iteration, [checksum(chunk) for chunk in chunks(payload)])
    if flaw:
        raise Unreadable(f"{path} is damaged: {flaw}")
