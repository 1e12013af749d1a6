"""Files kept between processes: each says what it is, and is used only if it is exactly that.

A file is one header line (magic, key, SHA-256 and length of the payload) and the payload. A truncated file, one of
another key, version or program, or one with a flipped bit is as good as none: `get` returns None and it is made anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from isojax.errors import Unavailable

MAGIC = b"isojax-store-1"
log = logging.getLogger(__name__)
_warned: set[Path] = set()  # folders: one warning is enough for hundreds of kernels


def folder() -> Path:
    """Where files are kept: $ISOJAX_CACHE, or isojax below the user's cache folder. Raises Unavailable without one."""
    if given := os.environ.get("ISOJAX_CACHE"):
        return Path(given)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "isojax"
    try:
        return Path.home() / ".cache" / "isojax"
    except RuntimeError:  # a container's user without a home
        raise Unavailable("there is no home folder to keep compiled kernels in; set ISOJAX_CACHE to a folder") from None


def key_of(*parts: object) -> str:
    """SHA-256 of the parts' texts: a file's name, and what it must say it is."""
    digest = hashlib.sha256()
    for p in parts:
        text = p if isinstance(p, bytes) else str(p).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def get(key: str) -> bytes | None:
    """The payload kept under a key, or None where there is no sound file."""
    path = _path(key)
    try:
        head, _, payload = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if head != _header(key, payload):
        log.warning("%s is truncated or not ours; it will be made anew", path)
        return None
    return payload


def put(key: str, payload: bytes) -> None:
    """Keep a payload. Readers see the whole file or none. A folder that cannot be written is one warning a process."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as f:
            try:
                f.write(_header(key, payload) + b"\n" + payload)
                f.flush()
                os.replace(f.name, path)
            except BaseException:
                os.unlink(f.name)
                raise
    except OSError as e:
        _cannot_keep(e)


def writable() -> bool:
    """Whether anything can be kept; if not, that is one warning a process."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder()).close()
    except OSError as e:
        _cannot_keep(e)
        return False
    return True


def _cannot_keep(e: OSError) -> None:
    if folder() not in _warned:
        _warned.add(folder())
        why = e.strerror or str(e)
        log.warning("cannot keep files in %s: %s; set ISOJAX_CACHE to a folder that can be written", folder(), why)


def _header(key: str, payload: bytes) -> bytes:
    return b" ".join((MAGIC, key.encode(), hashlib.sha256(payload).hexdigest().encode(), str(len(payload)).encode()))


def _path(key: str) -> Path:
    return folder() / key[:2] / key
