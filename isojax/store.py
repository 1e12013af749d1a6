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

MAGIC = b"isojax-store-1"
log = logging.getLogger(__name__)


def folder() -> Path:
    """Where files are kept: $ISOJAX_CACHE, or isojax below the user's cache folder."""
    given = os.environ.get("ISOJAX_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "isojax"


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
    """Keep a payload. Readers see the whole file or none. A folder that cannot be written is a warning."""
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
        log.warning("cannot keep %s: %s", path, e)


def _header(key: str, payload: bytes) -> bytes:
    return b" ".join((MAGIC, key.encode(), hashlib.sha256(payload).hexdigest().encode(), str(len(payload)).encode()))


def _path(key: str) -> Path:
    return folder() / key[:2] / key
