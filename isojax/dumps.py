"""What Mosaic says of a kernel while it compiles it: asked for by environment variables, told on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def caught(folder: Path, **wanted: str) -> Iterator[Path]:
    """Standard output of the process, C++'s included, goes to a file in `folder`. wanted: the variables that ask."""
    said = folder / "said"
    old = {k: os.environ.get(k) for k in (*wanted, "MOSAIC_GPU_DUMP_TO")}
    sys.stdout.flush()
    saved = os.dup(1)
    with said.open("wb") as f:
        os.dup2(f.fileno(), 1)
    os.environ.update(wanted)
    os.environ.pop("MOSAIC_GPU_DUMP_TO", None)  # it would take the dumps, and write every pass to files
    try:
        yield said
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        for k, v in old.items():
            os.environ.pop(k, None)
            if v is not None:
                os.environ[k] = v
