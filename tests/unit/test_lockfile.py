"""One daemon for each socket, whatever comes between its steps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kvstore.errors import AlreadyRunning
from kvstore.lockfile import SUFFIX, SocketLock


def test_it_has_one_holder_who_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "folder" / "kv.sock")
    with SocketLock(path), pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}") as refused:
        SocketLock(path)
    assert refused.value.holder_pid == os.getpid()
    assert list((tmp_path / "folder").iterdir()) == []
    with SocketLock(path):
        pass


def test_a_file_that_its_holder_removes_after_it_was_opened_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stops and one that starts meet: the second has opened the file and the first removes it."""
    path, lock, opened = str(tmp_path / "kv.sock"), fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        opened.append(fd)
        if len(opened) == 1:
            os.unlink(path + SUFFIX)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with SocketLock(path):
        assert len(opened) == 2
        with pytest.raises(AlreadyRunning):
            SocketLock(path)
