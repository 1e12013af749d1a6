"""Rows of log-probabilities taken at the sampler, for parity gates: the API is too slow for a whole vocabulary.

One row is the distribution after one token. It is named by the request and by the position of that token, so a row
that preemption or a changed chunk computes again carries the same name, and has to carry the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from isojax.errors import InputError

Mode = Literal["digest", "rows"]


def digest(row: np.ndarray) -> str:
    """SHA-256 over a float32 row's bytes: equal exactly where all bits are."""
    return hashlib.sha256(np.ascontiguousarray(row, np.float32).tobytes()).hexdigest()


class Tap:
    """Collects [(request id, position, row)]; a row is its digest, or its bytes.

    Request ids are vLLM's internal ones: the caller's, a dash, and eight characters.
    """

    def __init__(self, mode: Mode = "digest"):
        if mode not in ("digest", "rows"):
            raise InputError(f"tap mode {mode!r} is unknown; use 'digest' or 'rows'")
        self.mode, self._taken = mode, []

    def record(self, requests: Sequence[str], positions: Sequence[int], rows: Any) -> None:
        """rows: a float32 tensor [n, V]. Waits for the GPU. Raises ValueError where the counts differ."""
        host = rows.cpu().numpy()
        keep = digest if self.mode == "digest" else np.ndarray.tobytes
        self._taken += [(r, int(p), keep(x)) for r, p, x in zip(requests, positions, host, strict=True)]

    def take(self) -> list[tuple[str, int, Any]]:
        """What was recorded since the last call."""
        taken, self._taken = self._taken, []
        return taken


def by_request(taken: Sequence[Sequence[Any]]) -> dict[str, dict[int, Any]]:
    """caller's request id -> position -> row. Raises ValueError where one name came with two different rows."""
    out: dict[str, dict[int, Any]] = {}
    for request, position, row in taken:
        rows = out.setdefault(request.rpartition("-")[0], {})
        if rows.setdefault(position, row) != row:
            raise ValueError(f"request {request} position {position} was computed twice, with different bits")
    return out
