"""The small file by which the processes of a job find each other.

    {"token": "...", "contacts": ["10.4.0.7:41235", ...]}

For its owner's eyes alone (mode 0600), and whole whenever it is there. The guardian that forms the
job writes it before anybody can join, every later leader writes it anew, and the leader removes it
at the job's end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable

from deadpool.config import MIN_TOKEN_LENGTH, ConfigError, format_address, parse_address

logger = logging.getLogger(__name__)

MAX_CONTACTS = 64
_MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What it says."""

    token: str
    contacts: tuple[tuple[str, int], ...]
    """Control addresses of guardians, the leader's first."""


def write(path: str, token: str, contacts: Iterable[tuple[str, int]]) -> None:
    """Put a whole file in the place of what is there; of contacts the first 64. Raises OSError."""
    record = {
        "token": token,
        "contacts": [format_address(contact) for contact in list(contacts)[:MAX_CONTACTS]],
    }
    temporary = f"{path}.{secrets.token_hex(4)}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # Whatever the umask left of it.
            json.dump(record, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def load(path: str) -> JobFile:
    """Raises FileNotFoundError, and ConfigError for a file that is not to be trusted or is none."""
    return _parse(path, read_private(path))


def read_private(path: str) -> bytes:
    """A secret's file, at most 1 MiB. Raises FileNotFoundError, and ConfigError where others could
    read or write it, or it is not ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): give a plain file of yours"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no plain file: give another path")
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to user {status.st_uid}, this process to {os.geteuid()}: give "
                "a path in a folder of your own"
            )
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"{path} has mode {mode:04o}, so that others can read the job's token: type "
                f"`chmod 600 {path}` if nobody has, and start the job with a new one otherwise"
            )
        return file.read(_MAX_BYTES)


_said: set[tuple[str, str]] = set()
"""What `read`, which is called again and again, has said once."""


def read(path: str) -> JobFile | None:
    """None when it is not there, or is not to be used, which is logged once. Never raises."""
    try:
        return load(path)
    except FileNotFoundError:
        return None
    except (ConfigError, OSError) as error:
        if (path, str(error)) not in _said:
            _said.add((path, str(error)))
            logger.warning("%s", error)
        return None


def remove(path: str) -> None:
    """Without a word when it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error.strerror)


def _parse(path: str, data: bytes) -> JobFile:
    try:
        record = json.loads(data)
        token, contacts = record["token"], record["contacts"]
        if not (isinstance(token, str) and isinstance(contacts, list)):
            raise TypeError("token and contacts are of other types")
        if len(token) < MIN_TOKEN_LENGTH:
            raise ValueError(f"its token has {len(token)} characters")
        return JobFile(token=token, contacts=tuple(parse_address(str(c)) for c in contacts))
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(
            f"{path} is not a job's file ({type(error).__name__}: {error}): remove it, or give "
            "another DEADPOOL_JOB_FILE"
        ) from error
