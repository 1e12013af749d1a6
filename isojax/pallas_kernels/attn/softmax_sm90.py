"""The softmax schedule of attn.core on one warpgroup's 64 rows: what every sm90 kernel of the region shares.

Every instruction that rounds is named in isojax.pallas_kernels.warpgroup, so that the bits do not depend on which
kernel a step is in: PTX's mul.f32 and add.f32, which is what Mosaic's own arithmetic becomes, may be contracted to an
FMA or not, depending on the code around them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from isojax.pallas_kernels import warpgroup as wg
from isojax.schedule import LOG2E

Panels = tuple[jax.Array, ...]  # [64, D] fp32 in registers, in panels of 64 columns


class Running(NamedTuple):
    """Softmax of one partition so far: largest scaled score, and denominator as wg.weigh_second holds it; [64] each."""

    m: jax.Array
    den: jax.Array


class Total(NamedTuple):
    """Softmax of the finished partitions: [64] each; their sum is kept apart."""

    m: jax.Array
    den: jax.Array


def nothing(head_dim: int) -> Panels:
    return tuple(wg.zeros(64) for _ in range(head_dim // 64))


def start() -> Running:
    return Running(wg.full_row(wg.LOWEST), wg.full_row(0.0))


def begin() -> Total:
    return Total(wg.full_row(wg.LOWEST), wg.full_row(0.0))


def weigh(scores: jax.Array, state: Running, scale: float, anew) -> tuple[jax.Array, Running, jax.Array]:
    """One tile of raw scores [64, keys] -> p, the state with it, and the factor of what was summed before.

    anew: the tile is its partition's first; what `state` holds is dropped.
    """
    x, m, alpha = weigh_first(scores, state, scale, anew)
    return *weigh_second(x, m, state, alpha, scale), alpha


def weigh_few(scores: jax.Array, state: Running, scale: float, anew) -> tuple[jax.Array, Running, jax.Array]:
    """As `weigh`, where only the first 8 rows matter."""
    p, m, den, alpha = wg.weigh_few(scores, state.m, state.den, scale * LOG2E, anew)
    return p, Running(m, den), alpha


def weigh_first(scores: jax.Array, state: Running, scale: float, anew) -> tuple[jax.Array, ...]:
    """The first half of `weigh` -> half of p, and of `weigh`'s results the new maximum and the factor."""
    return wg.weigh_first(scores, state.m, scale * LOG2E, anew)


def weigh_second(x: jax.Array, m: jax.Array, state: Running, alpha: jax.Array, scale: float):
    """What `weigh_first` gave, and the state that it took -> p, the state with it."""
    p, den = wg.weigh_second(x, m, state.den, alpha, scale * LOG2E)
    return p, Running(m, den)


def close(total: Total, part: Running) -> tuple[Total, jax.Array, jax.Array]:
    """Add a finished partition's rows to those before it -> and the factors of the sum before it and of its own."""
    m, den, old, new = wg.meet(total.m, total.den, part.m, wg.row_sum(part.den))
    return Total(m, den), old, new
