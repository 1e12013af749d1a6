"""How one warpgroup of a sm90 kernel holds a row: strips of 128 threads x up to 16 bytes, the same in any batch.

A row of n elements is cut, widest accesses first, into strips whose width is a multiple of 128. What is left over at
the end is covered by a strip that overlaps its predecessor: its first `seen` elements were loaded before, so a
reduction masks them, and writing them again writes the same bits. No access is out of bounds, no row needs padding.
The cut is a function of n alone, which makes a row's reduction tree a constant of the region (docs/bits.md, rule 3).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported

THREADS = 128  # of one warpgroup
ACCESS = 16  # bytes of the widest load or store of a thread


class Strip(NamedTuple):
    """Elements [start, start + width) of a row, `vec` neighbouring ones per access; the first `seen` are repeats."""

    start: int
    width: int
    vec: int
    seen: int = 0

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED((self.width,), self.vec)


def strips(n: int, dtype, widest: int | None = None) -> list[Strip]:
    """The strips of a row of n elements of `dtype`; none wider than `widest` where that is given.

    n >= 128. Every strip starts at a multiple of its access width if n is a multiple of it.
    """
    vec = ACCESS // jnp.dtype(dtype).itemsize
    out, at = [], 0
    whole = n // (THREADS * vec) * THREADS * vec
    step = max(min(widest or whole, whole), THREADS * vec)
    while at < whole:
        out.append(Strip(at, min(step, whole - at), vec))
        at += out[-1].width
    while vec > 1:
        vec //= 2
        if n - at >= THREADS * vec:
            out.append(Strip(at, THREADS * vec, vec))
            at += THREADS * vec
    if at < n:
        out.append(Strip(n - THREADS, THREADS, 1, seen=at - (n - THREADS)))
    return out


def apart(cut: list[Strip]) -> list[list[Strip]]:
    """The strips in groups that different programs may write: one each, but a repeat with what it repeats."""
    groups = [[s] for s in cut if not s.seen]
    groups[-1] += [s for s in cut if s.seen]
    return groups


def load(row, s: Strip) -> jax.Array:
    """Strip s of a one-row ref, straight from global memory."""
    return plgpu.load(row.at[pl.ds(s.start, s.width)], layout=s.layout)


def store(row, s: Strip, value: jax.Array) -> None:
    """Write strip s of a one-row ref."""
    row[pl.ds(s.start, s.width)] = value


def total(values: list[jax.Array], cut: list[Strip]) -> jax.Array:
    """Sum of a row's fp32 strips: each by its own tree over the warpgroup, then strip after strip."""
    whole = None
    for v, s in zip(values, cut, strict=True):
        if s.seen:
            v = jnp.where(plgpu.broadcasted_iota(jnp.int32, (s.width,), 0, layout=s.layout) >= s.seen, v, 0.0)
        part = jnp.sum(v)
        whole = part if whole is None else whole + part
    assert whole is not None
    return whole


def check_rows(region: str, *arrays, columns: int, widest: int = 8192) -> None:
    """Raise Unsupported unless all arrays are bfloat16 and a row has 128 .. `widest` columns, a multiple of 8."""
    for a in arrays:
        if a.dtype != jnp.bfloat16:
            raise Unsupported(region, f"an operand of {a.dtype}", "bfloat16 on sm90", "cast weights when loading them")
    if columns % 8 or not THREADS <= columns <= widest:
        raise Unsupported(
            region,
            f"rows of {columns} columns",
            f"{THREADS} to {widest} columns, a multiple of 8 (16-byte accesses)",
            "use the cpu arch, or widen the kernel's strips",
        )
