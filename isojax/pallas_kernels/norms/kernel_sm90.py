"""Hopper kernels of the normalisation regions: a warpgroup holds a row in registers, or two where there are many."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.strips import check_rows, load, store, strips, total

f32 = jnp.float32
MANY = 4096  # rows from which a warpgroup takes two: half as many blocks, and the weight is read half as often


def together(rows: int) -> int:
    """Rows of a warpgroup, which are loaded at once; they change speed, never bits."""
    return 2 if rows >= MANY and rows % 2 == 0 else 1


def rms_supports(x, weight, *, eps, zero_centered):
    check_rows("norms.rms", x, weight, columns=x.shape[1])


def add_rms_supports(x, delta, weight, *, eps, zero_centered):
    check_rows("norms.add_rms", x, delta, weight, columns=x.shape[1])


def _finish(rows, cut, weight, y, rstd, first, eps, zero_centered):
    """Norms of rows from `first` on, each given as its strips in bf16: what rms and add_rms share, and with it bits."""
    gamma = [load(weight, s) for s in cut]  # before the reductions, so that its latency is hidden
    gamma = [g.astype(f32) + 1.0 if zero_centered else g.astype(f32) for g in gamma]
    n = sum(s.width - s.seen for s in cut)
    for i, row in enumerate(rows):
        v = [r.astype(f32) for r in row]
        r = lax.rsqrt(total([a * a for a in v], cut) * (1.0 / n) + eps)
        for a, g, s in zip(v, gamma, cut, strict=True):
            store(y.at[first + i], s, (a * r * g).astype(y.dtype))
        rstd[first + i] = r


def rms(x, weight, *, eps, zero_centered):
    rows, columns = x.shape
    cut, each = strips(columns, x.dtype), together(rows)

    def norms_rms(x, weight, y, rstd):
        first = lax.axis_index("row") * each
        held = [[load(x.at[first + i], s) for s in cut] for i in range(each)]
        _finish(held, cut, weight, y, rstd, first, eps, zero_centered)

    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows,), f32))
    return plgpu.kernel(norms_rms, out_type=out, grid=(rows // each,), grid_names=("row",))(x, weight)


def add_rms(x, delta, weight, *, eps, zero_centered):
    rows, columns = x.shape
    cut, each = strips(columns, x.dtype), together(rows)

    def norms_add_rms(x, delta, weight, h, y, rstd):
        first = lax.axis_index("row") * each
        at = [first + i for i in range(each)]
        pairs = [[(load(x.at[t], s), load(delta.at[t], s)) for s in cut] for t in at]
        held = [[(a.astype(f32) + b.astype(f32)).astype(h.dtype) for a, b in row] for row in pairs]
        for t, row in zip(at, held, strict=True):
            for r, s in zip(row, cut, strict=True):
                store(h.at[t], s, r)
        _finish(held, cut, weight, y, rstd, first, eps, zero_centered)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = (like, like, jax.ShapeDtypeStruct((rows,), f32))
    return plgpu.kernel(norms_add_rms, out_type=out, grid=(rows // each,), grid_names=("row",))(x, delta, weight)
