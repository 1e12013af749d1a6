"""Files that results go to, looked at before minutes are spent on what they shall hold."""

from __future__ import annotations

import os
from pathlib import Path

from isojax.errors import InputError


def check(path: Path) -> None:
    """Raises InputError where no file can be written at `path`."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder}; make it first")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give a file in it")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: no right to write in {folder}; give a file elsewhere")
