"""The row gate: a row's output bits are a function of the row, whatever its batch, position, neighbours and padding.

Rows are computed alone first, in a tile padded with garbage, at its first and last position; then in batches that
place them first, in the middle and last. Every row of every batch is compared with the first time it was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from isojax.gates.bits import Diff, compare, integers
from isojax.gates.case import Case, GateBroken
from isojax.region import Region
from isojax.schedule import ROW_TILE, padded

BATCHES = (1, 2, 63, 64, 65, 255, 256, 257, 4096)
QUICK_BATCHES = (1, 2, 63, 64, 65)
TILE = {"cpu": ROW_TILE, "sm90": 64}  # row counts are multiples of this; callers pad
GARBAGE = ("random", "nan", "large")
PROBES = 3  # rows that are computed alone
PADDING = -1  # in a layout: a row of garbage

Run = Callable[[Sequence[Any]], Sequence[np.ndarray]]


def row_operands(region: Region) -> list[int]:
    """Positions of the operands with one independent row per token."""
    return [region.operands.index(name) for name in region.rows]


def layouts(pool: int, tile: int, batches: Sequence[int]) -> Iterator[tuple[str, np.ndarray, str]]:
    """(label, the pool's row at each position or PADDING, kind of garbage), rows alone first."""
    probes = np.linspace(0, pool - 1, PROBES).astype(int)
    for probe in probes:
        for position in (0, tile - 1):
            for garbage in GARBAGE:
                at = np.full(tile, PADDING)
                at[position] = probe
                yield f"row {probe} alone at {position}, {garbage} padding", at, garbage
    for b, batch in enumerate(batches):
        for p, position in enumerate(sorted({0, batch // 2, batch - 1})):
            garbage = GARBAGE[(b + p) % len(GARBAGE)]
            at = np.full(padded(batch, tile), PADDING)
            # consecutive rows of the pool, turned so that a row computed alone comes to lie at `position`
            at[:batch] = (probes[p] - position + np.arange(batch)) % pool
            yield f"batch of {batch}, row {probes[p]} at {position}, {garbage} padding", at, garbage


def _garbage(operand: np.ndarray, kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Rows to pad with. Integers stay valid: they are indices, and padding has to be readable."""
    picked = operand[rng.integers(0, len(operand), count)]
    if operand.dtype.kind in "iub":
        return picked
    if kind == "nan":
        return np.full_like(picked, np.nan)
    if kind == "large":
        return (np.sign(picked.astype(np.float32)) * np.float32(3e38)).astype(operand.dtype)
    return picked[:, ...] * np.asarray(-3, operand.dtype)


class _Seen:
    """The first bits seen of every row of the pool."""

    def __init__(self, pool: int):
        self.filled, self.outs, self.pool = np.zeros(pool, bool), [], pool

    def compare(self, at: np.ndarray, outs: Sequence[np.ndarray], label: str) -> Diff:
        real = np.flatnonzero(at != PADDING)
        if not self.outs:
            self.outs = [np.empty((self.pool, *o.shape[1:]), o.dtype) for o in outs]
        known = real[self.filled[at[real]]]
        new = real[~self.filled[at[real]]]
        diff = Diff(0, 0)
        for i, (o, store) in enumerate(zip(outs, self.outs, strict=True)):
            if o.shape[0] != len(at):
                raise GateBroken(f"output {i} has {o.shape[0]} rows for {len(at)}: it is no row output")
            diff = diff + compare(o[known], store[at[known]], f"{label}, output {i} ")
            store[at[new]] = o[new]
        self.filled[at[new]] = True
        return diff


def check(
    region: Region, case: Case, run: Run, tile: int, batches: Sequence[int], seed: int = 0, first_only: bool = False
) -> Diff:
    """Run the gate on `run(args) -> outputs`; first_only stops at the first difference."""
    rng = np.random.default_rng(seed)
    rows = row_operands(region)
    pool = case.args[rows[0]].shape[0]
    seen, total = _Seen(pool), Diff(0, 0)
    batches = [b for b in batches if b <= pool]
    for label, at, kind in layouts(pool, tile, batches):
        args = list(case.args)
        for i in rows:
            args[i] = case.args[i][at]  # PADDING picks the last row, replaced at once
            args[i][at == PADDING] = _garbage(case.args[i], kind, int((at == PADDING).sum()), rng)
        total = total + seen.compare(at, run(args), label)
        if first_only and total.differing:
            break
    return total


# -- negative controls -------------------------------------------------------------------------------------------------
def _flip(outs: Sequence[np.ndarray], rows: Any) -> list[np.ndarray]:
    """The outputs with the last bit of the first element of `rows` flipped in output 0."""
    first = np.array(outs[0])
    bits = integers(first).reshape(len(first), -1)
    bits[rows, 0] ^= 1
    return [bits.reshape(first.shape).view(first.dtype), *outs[1:]]


def controls(region: Region, case: Case, run: Run, tile: int) -> dict[str, Run]:
    """Implementations that the gate must catch, each deviating in one last bit."""
    rows = row_operands(region)

    def by_batch(args):
        outs = run(args)
        return _flip(outs, slice(None)) if len(outs[0]) > tile else outs

    def by_position(args):
        return _flip(run(args), -1)

    def by_padding(args):
        floats = [args[i] for i in rows if args[i].dtype.kind not in "iub"]
        dirty = any(np.isnan(a.astype(np.float32)).any() for a in floats)
        return _flip(run(args), slice(None)) if dirty else run(args)

    found = {"bits by batch size": by_batch, "bits by position": by_position}
    if any(case.args[i].dtype.kind not in "iub" for i in rows):
        found["bits by padding"] = by_padding
    return found
