"""Hopper kernel of the feed-forward activation: one warpgroup per strip of a row."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.strips import Strip, apart, check_rows, load, store, strips
from isojax.schedule import LOG2E

f32 = jnp.float32
WIDEST = 2048  # elements of a strip: 32 bytes of gate and of up in flight per thread
FEW = 512  # rows up to which each strip is a program of its own: one a row would leave the GPU waiting on its strips


def swiglu_supports(gate_up):
    # half a row is where `up` starts, so that it has to be a multiple of 8 as well
    check_rows("mlp.swiglu", gate_up, columns=gate_up.shape[1] // 2, widest=65536)


def sigmoid(x):
    # Mosaic divides approximately (div.full), by the same instruction for every element
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2E))


def swiglu(gate_up):
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    cut = strips(columns, gate_up.dtype, WIDEST)
    parts = apart(cut) if rows <= FEW else [cut]

    def mlp_swiglu(gate_up, out):
        t, part = lax.axis_index("row"), lax.axis_index("part")

        def one(s):
            gate = load(gate_up.at[t], s).astype(f32)
            up = load(gate_up.at[t], Strip(columns + s.start, s.width, s.vec)).astype(f32)
            store(out.at[t], s, (gate * sigmoid(gate) * up).astype(out.dtype))

        def all_of(some):
            for s in some:
                one(s)

        for p, mine in enumerate(parts):
            pl.when(part == p)(functools.partial(all_of, mine))

    out = jax.ShapeDtypeStruct((rows, columns), gate_up.dtype)
    return plgpu.kernel(mlp_swiglu, out_type=out, grid=(rows, len(parts)), grid_names=("row", "part"))(gate_up)
