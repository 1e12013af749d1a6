"""Files that results go to: whole or not at all, and refused before anything is measured."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from contract import files
from isojax import outputs
from isojax.alone import alone
from isojax.errors import InputError


def test_a_file_is_replaced_at_once_or_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    files.write(path, "old")
    files.write(path, "new\n")
    assert path.read_text() == "new\n"

    def full(*_):
        raise OSError(28, "No space left on device", "scratch")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left.*{path}"):
        files.write(path, "newer")
    assert path.read_text() == "new\n" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "x"
    files.write(os.devnull, "x")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch):
    outputs.check(tmp_path / "r.json")
    with pytest.raises(InputError, match="no folder .*make it first"):
        outputs.check(tmp_path / "no" / "r.json")
    with pytest.raises(InputError, match="is a folder; give a file"):
        outputs.check(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(InputError, match=f"no right to write in {tmp_path}"):
        outputs.check(tmp_path / "r.json")


def test_one_process_at_a_time_measures(tmp_path):
    """Another process waits at the lock, also where it could not write the file."""
    code = """
import sys
from pathlib import Path
from isojax.alone import alone
print("before", flush=True)
with alone(Path(sys.argv[1])):
    print("in")
"""
    lock = tmp_path / "lock"
    with alone(lock):
        lock.chmod(0o444)
        other = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True)
        assert other.stdout and other.stdout.readline() == "before\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    assert other.communicate(timeout=60)[0] == "in\n" and other.returncode == 0
