"""One side of a benchmark in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from isojax.errors import IsoError

SECONDS = 1800
TAIL = 15  # lines of a log


def run(name: str, module: list[Any], log: Path, **environment: str) -> None:
    """`python -m MODULE ARGUMENTS...`, all it says in `log`. Raises IsoError with the log's end where it failed."""
    command = [sys.executable, "-m", *map(str, module)]
    with log.open("wb") as f:
        try:
            done = subprocess.run(command, stdout=f, stderr=f, env=os.environ | environment, timeout=SECONDS)
            code, how = done.returncode, f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            code, how = -1, f"was ended after {SECONDS} s"
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
        raise IsoError(f"{name} {how}; its log {log} ends:\n{end}")
