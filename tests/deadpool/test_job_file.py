"""The file by which the processes of a job find each other: whole, and for its owner alone."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading

import pytest

from deadpool import job_file
from deadpool.config import ConfigError
from deadpool.job_file import JobFile

TOKEN = "0123456789abcdef" * 4
CONTACTS = (("10.4.0.7", 41235), ("fd00::7", 7))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(job_file, "_said", set())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "job.json")


def test_file_written_reads_back_and_is_for_its_owner_alone(path, tmp_path):
    before = os.umask(0o277)
    try:
        job_file.write(path, TOKEN, CONTACTS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert job_file.read(path) == JobFile(token=TOKEN, contacts=CONTACTS)
    assert json.loads((tmp_path / "job.json").read_text()) == {
        "token": TOKEN,
        "contacts": ["10.4.0.7:41235", "[fd00::7]:7"],
    }
    assert os.listdir(tmp_path) == ["job.json"]


def test_of_many_contacts_the_first_are_kept(path):
    contacts = tuple(("host", port) for port in range(1, 100))
    job_file.write(path, TOKEN, contacts)
    assert job_file.load(path).contacts == contacts[:64]


def test_rewriting_replaces_what_others_could_read(path):
    open(path, "w").close()
    os.chmod(path, 0o644)
    job_file.write(path, TOKEN, CONTACTS)
    assert job_file.load(path).token == TOKEN


def test_absent_file_is_none_and_removed_without_a_word(path, caplog):
    assert job_file.read(path) is None
    job_file.remove(path)
    with pytest.raises(FileNotFoundError):
        job_file.load(path)
    assert caplog.records == []


def test_removed_file_is_gone(path):
    job_file.write(path, TOKEN, CONTACTS)
    job_file.remove(path)
    assert job_file.read(path) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o601])
def test_file_that_others_can_touch_is_refused_with_what_to_type(path, mode, caplog):
    job_file.write(path, TOKEN, CONTACTS)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        job_file.load(path)
    assert job_file.read(path) is None and job_file.read(path) is None
    assert len(caplog.records) == 1 and "chmod 600" in caplog.text
    assert TOKEN not in caplog.text


def test_file_of_somebody_else_is_refused(path, monkeypatch):
    job_file.write(path, TOKEN, CONTACTS)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        job_file.load(path)


def test_what_is_no_plain_file_is_refused_at_once(path, tmp_path):
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="no plain file"):
        job_file.load(path)
    link = str(tmp_path / "link")
    os.symlink(path, link)
    with pytest.raises(ConfigError, match="cannot be read"):
        job_file.load(link)


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps({"token": TOKEN, "contacts": ["h:1"]})[:-9],
        "[]",
        "7",
        "[" * 100_000,
        '{"token": "short", "contacts": []}',
        json.dumps({"token": 5, "contacts": []}),
        json.dumps({"token": TOKEN}),
        json.dumps({"token": TOKEN, "contacts": "h:1"}),
        json.dumps({"token": TOKEN, "contacts": ["h"]}),
        json.dumps({"token": TOKEN, "contacts": [None]}),
    ],
    ids=range(11),
)
def test_half_or_foreign_file_is_none_and_says_why_once(path, text, caplog):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    with caplog.at_level(logging.WARNING):
        assert job_file.read(path) is None and job_file.read(path) is None
    assert len(caplog.records) == 1
    assert "is not a job's file" in caplog.text and "DEADPOOL_JOB_FILE" in caplog.text
    assert TOKEN not in caplog.text


def test_reader_never_sees_half_a_file(path, caplog):
    """A writer that does not rename is caught in far fewer rounds."""
    job_file.write(path, TOKEN, CONTACTS)
    done = threading.Event()

    def rewrite():
        for _ in range(300):
            job_file.write(path, TOKEN, CONTACTS * 30)
        done.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not done.is_set():
        assert job_file.read(path) is not None
    writer.join()
    assert caplog.records == []
