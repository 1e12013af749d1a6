"""Hopper kernel of the residual sum: one warpgroup per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.strips import check_rows, load, store, strips

f32 = jnp.float32
WIDEST = 4096  # elements of a strip: 64 bytes of each operand in flight per thread


def add_supports(x, delta):
    check_rows("residual.add", x, delta, columns=x.shape[1], widest=65536)


def add(x, delta):
    rows, columns = x.shape
    cut = strips(columns, x.dtype, WIDEST)

    def residual_add(x, delta, h):
        t = lax.axis_index("row")
        for s in cut:
            store(h.at[t], s, (load(x.at[t], s).astype(f32) + load(delta.at[t], s).astype(f32)).astype(h.dtype))

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(residual_add, out_type=out, grid=(rows,), grid_names=("row",))(x, delta)
