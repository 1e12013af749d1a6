"""Hopper kernel of gradient accumulation: the operands as flat vectors, one warpgroup per chunk."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.strips import THREADS, load, store, strips

f32 = jnp.float32
CHUNK = 2048  # elements of one warpgroup


def accumulate_supports(*parts):
    kinds = {(p.shape, str(p.dtype)) for p in parts}
    first = parts[0]
    if len(kinds) > 1 or first.dtype not in (jnp.bfloat16, jnp.float32):
        given = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in sorted(kinds))
        raise Unsupported("grad.accumulate", given, "one shape, bfloat16 or float32", "cast gradients where they arise")
    n = math.prod(first.shape)
    if n < THREADS:
        raise Unsupported("grad.accumulate", f"{n} elements", f"at least {THREADS}", "use the cpu arch")


def accumulate(*parts):
    first = parts[0]
    n = math.prod(first.shape)
    chunks = max(1, n // CHUNK)
    last = n - (chunks - 1) * CHUNK  # the last chunk takes what is left over, so that it is never a sliver

    def grad_accumulate(*refs):
        *ins, out = refs
        chunk = lax.axis_index("chunk")

        def add(size):
            here = pl.ds(chunk * CHUNK, size)
            for s in strips(size, first.dtype, CHUNK):
                values = [load(r.at[here], s).astype(f32) for r in ins]
                store(out.at[here], s, functools.reduce(jnp.add, values).astype(out.dtype))

        pl.when(chunk < chunks - 1)(lambda: add(CHUNK))
        pl.when(chunk == chunks - 1)(lambda: add(last))

    out = jax.ShapeDtypeStruct((n,), first.dtype)
    run = plgpu.kernel(grad_accumulate, out_type=out, grid=(chunks,), grid_names=("chunk",))
    return run(*[p.reshape(n) for p in parts]).reshape(first.shape)
