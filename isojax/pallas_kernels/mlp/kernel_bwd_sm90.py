"""Hopper kernel of the activations' gradients: one warpgroup per row, strip after strip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.mlp.kernel_sm90 import sigmoid
from isojax.pallas_kernels.strips import Strip, check_rows, load, store, strips

f32 = jnp.float32
WIDEST = 2048  # elements of a strip: 32 bytes of gate, of up and of ct in flight per thread


def swiglu_bwd_supports(gate_up, ct):
    check_rows("mlp.swiglu_bwd", gate_up, ct, columns=ct.shape[1], widest=65536)


def swiglu_bwd(gate_up, ct):
    rows, columns = ct.shape
    cut = strips(columns, gate_up.dtype, WIDEST)

    def mlp_swiglu_bwd(gate_up, ct, out):
        t = lax.axis_index("row")
        for s in cut:
            right = Strip(columns + s.start, s.width, s.vec)
            gate, up = (load(gate_up.at[t], at).astype(f32) for at in (s, right))
            c = load(ct.at[t], s).astype(f32)
            p = sigmoid(gate)
            store(out.at[t], s, (c * up * p * (1.0 + gate * (1.0 - p))).astype(out.dtype))
            store(out.at[t], right, (c * gate * p).astype(out.dtype))

    out = jax.ShapeDtypeStruct(gate_up.shape, gate_up.dtype)
    return plgpu.kernel(mlp_swiglu_bwd, out_type=out, grid=(rows,), grid_names=("row",))(gate_up, ct)
