"""Where checkpoints lie on disk, and how one becomes the latest without endangering the last.

Megatron-LM's layout: `iter_0000010/` beside `latest_checkpointed_iteration.txt`. A checkpoint is
written to `iter_0000010.partial`, synced, renamed, and only then named in the tracker file, which
is replaced in one step. Whatever interrupts a save, the tracker names a complete checkpoint.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""In the tracker instead of an iteration: weights without a training state."""


def checkpoint_path(root: str | Path, iteration: int | str) -> Path:
    """The folder of one checkpoint."""
    if iteration == RELEASE:
        return Path(root) / RELEASE
    return Path(root) / f"iter_{int(iteration):07d}"


def partial_path(root: str | Path, iteration: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    final = checkpoint_path(root, iteration)
    return final.with_name(final.name + ".partial")


def _replaced_path(final: Path) -> Path:
    return final.with_name(final.name + ".replaced")


def latest_iteration(root: str | Path) -> int | str | None:
    """What the tracker names; None without a tracker. Raises ValueError for a damaged one."""
    tracker = Path(root) / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return RELEASE
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{tracker} holds {text!r}; it should hold an iteration, as 10, or 'release'"
        ) from None


def find_checkpoint(root: str | Path, iteration: int | str) -> Path | None:
    """The complete checkpoint of `iteration`, also if replacing it was interrupted half-way."""
    final = checkpoint_path(root, iteration)
    for path in (final, _replaced_path(final)):
        if (path / "metadata.json").is_file():
            return path
    return None


def prepare_partial(root: str | Path, iteration: int) -> None:
    """An empty folder to write to. One rank calls it."""
    path = partial_path(root, iteration)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def publish(root: str | Path, iteration: int) -> None:
    """Make the written checkpoint the latest. One rank calls it, after all have written.

    A checkpoint of the same iteration is moved aside, so that at every moment one of the two is
    complete and found by `find_checkpoint`.
    """
    partial, final = partial_path(root, iteration), checkpoint_path(root, iteration)
    for file in sorted(partial.iterdir()):
        _sync(file)
    _sync(partial)
    aside = _replaced_path(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
    _replace_text(Path(root) / TRACKER, str(iteration))


def remove_between(root: str | Path, previous: int | str | None, *, retain_interval: int) -> None:
    """Remove the checkpoint that was the latest before, unless it is one to retain."""
    if not isinstance(previous, int) or previous <= 0 or previous % retain_interval == 0:
        return
    path = checkpoint_path(root, previous)
    if not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, encoding="utf-8")
    _sync(fresh)
    os.replace(fresh, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
