"""Text files that a reader sees whole, old or new, and never in part."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` at once. Raises OSError, and leaves what was there, where that cannot be done."""
    target = Path(os.path.realpath(path))  # replace what a link points to, not the link
    if target.exists() and not target.is_file():  # a pipe or /dev/null is written to, never replaced
        target.write_text(text, encoding="utf-8")
        return
    # In the same folder, because a rename is atomic only within one file system; opened plainly rather than with
    # tempfile, so that the result has the usual permissions and not 0600.
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("xb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, target)
    except OSError as e:
        if e.errno:  # else it is a text alone, which a name would hide
            e.filename = os.fspath(path)  # the file that was asked for, not the scratch beside it
        raise
    finally:
        scratch.unlink(missing_ok=True)
