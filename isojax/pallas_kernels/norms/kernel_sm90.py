"""Hopper kernels of the normalisation regions: one warpgroup per row, the row held in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.strips import check_rows, load, store, strips, total

f32 = jnp.float32


def rms_supports(x, weight, *, eps, zero_centered):
    check_rows("norms.rms", x, weight, columns=x.shape[1])


def add_rms_supports(x, delta, weight, *, eps, zero_centered):
    check_rows("norms.add_rms", x, delta, weight, columns=x.shape[1])


def _finish(row, cut, weight, y, rstd, t, eps, zero_centered):
    """Norm of one row, given as its strips in bf16: the code that rms and add_rms share, and with it their bits."""
    gamma = [load(weight, s) for s in cut]  # before the reduction, so that its latency is hidden
    v = [r.astype(f32) for r in row]
    n = sum(s.width - s.seen for s in cut)
    r = lax.rsqrt(total([a * a for a in v], cut) * (1.0 / n) + eps)
    for a, g, s in zip(v, gamma, cut, strict=True):
        g = g.astype(f32) + 1.0 if zero_centered else g.astype(f32)
        store(y.at[t], s, (a * r * g).astype(y.dtype))
    rstd[t] = r


def rms(x, weight, *, eps, zero_centered):
    rows, columns = x.shape
    cut = strips(columns, x.dtype)

    def norms_rms(x, weight, y, rstd):
        t = lax.axis_index("row")
        _finish([load(x.at[t], s) for s in cut], cut, weight, y, rstd, t, eps, zero_centered)

    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows,), f32))
    return plgpu.kernel(norms_rms, out_type=out, grid=(rows,), grid_names=("row",))(x, weight)


def add_rms(x, delta, weight, *, eps, zero_centered):
    rows, columns = x.shape
    cut = strips(columns, x.dtype)

    def norms_add_rms(x, delta, weight, h, y, rstd):
        t = lax.axis_index("row")
        pairs = [(load(x.at[t], s), load(delta.at[t], s)) for s in cut]
        row = [(a.astype(f32) + b.astype(f32)).astype(h.dtype) for a, b in pairs]
        for r, s in zip(row, cut, strict=True):
            store(h.at[t], s, r)
        _finish(row, cut, weight, y, rstd, t, eps, zero_centered)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = (like, like, jax.ShapeDtypeStruct((rows,), f32))
    return plgpu.kernel(norms_add_rms, out_type=out, grid=(rows,), grid_names=("row",))(x, delta, weight)
