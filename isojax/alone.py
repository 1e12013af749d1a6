"""One process at a time measures on this machine's GPU: two would time each other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

LOCK = Path(gettempdir()) / "isojax-gpu.lock"


@contextmanager
def alone(lock: Path = LOCK) -> Iterator[None]:
    """Waits until no other process is inside, and ends with the process at the latest."""
    try:
        f = open(lock)  # another user's will do: nothing is written
    except FileNotFoundError:
        f = open(lock, "a")
    with f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
