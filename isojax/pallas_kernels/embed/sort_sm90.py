"""Positions sorted by (token, position) on sm90: the rank of each is counted, as how many come before it.

A block ranks 64 positions by comparing their tokens with all T; its warpgroups share the others. Compared are fp32
numbers, since an addition that saturates at 1 counts where an integer comparison would take twice the time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg

f32, i32 = jnp.float32, jnp.int32
POSITIONS = 64  # that a block ranks, and that a warpgroup compares them with at a time
WARPGROUPS = 4
AHEAD = 4  # times POSITIONS that a warpgroup compares with while the next ones are on their way
MOST_POSITIONS = 1 << 17  # ranking is quadratic
MOST_TOKENS = 1 << 24  # fp32 holds each of them
BLOCK = (POSITIONS, POSITIONS)
LAYOUT: Any = plgpu.Layout.WGMMA
ROW, COLUMN = (LAYOUT.reduce(axis) for axis in (1, 0))


def sort(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """tokens [T] int32 below MOST_TOKENS -> positions ordered by (token, position), tokens in that order; int32 [T]."""
    n = tokens.shape[0]
    blocks = n // POSITIONS
    trips = -(-blocks // (WARPGROUPS * AHEAD))

    def embed_sort(tokens, order, ranked, counts, done):
        tile, wg = lax.axis_index("tile"), lax.axis_index("wg")
        first = tile * POSITIONS
        along = lambda v, axis: plgpu.layout_cast(lax.broadcast_in_dim(v, BLOCK, [axis]), LAYOUT)
        read = lambda at, layout: plgpu.load(tokens.at[pl.ds(at, POSITIONS)], layout=layout, optimized=False)
        own = read(first, ROW)
        index = lambda i, k: (i * AHEAD + k) * WARPGROUPS + wg
        fetch = lambda i: tuple(read(lax.min(index(i, k), blocks - 1) * POSITIONS, COLUMN) for k in range(AHEAD))

        def compare(i, carry):
            count, some = carry
            after = fetch(i + 1)
            for k, others in enumerate(some):
                j = index(i, k)
                past = jnp.where(j < blocks, 0, MOST_TOKENS)  # above every token
                # equal tokens count where they stand before: a whole block of them does, or none of it
                limit = own + jnp.where(j < tile, 1, 0)
                count = count + at_least_1(along(limit.astype(f32), 0), along((others + past).astype(f32), 1))
            return count, after

        count = plgpu.layout_cast(jnp.zeros(BLOCK, f32), LAYOUT)
        count, _ = lax.fori_loop(0, trips, compare, (count, fetch(0)))
        row, column = (plgpu.broadcasted_iota(i32, BLOCK, axis, layout=LAYOUT) for axis in (0, 1))
        earlier = (along(read(first, COLUMN), 1) == along(own, 0)) & (column < row) & (wg == 0)
        counts[wg] = jnp.sum(count + jnp.where(earlier, 1.0, 0.0), axis=1).astype(i32)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

        def place(i, _):
            at = wg * (POSITIONS // WARPGROUPS) + i
            rank = sum(counts[k, at] for k in range(WARPGROUPS))
            order[rank] = first + at
            ranked[rank] = tokens[first + at]

        lax.fori_loop(0, POSITIONS // WARPGROUPS, place, None)

    out = jax.ShapeDtypeStruct((n,), i32)
    return plgpu.kernel(
        embed_sort,
        out_type=(out, out),
        scratch_types=(plgpu.SMEM((WARPGROUPS, POSITIONS), i32), plgpu.Barrier(num_arrivals=WARPGROUPS)),
        grid=(blocks,),
        grid_names=("tile",),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )(tokens)


def at_least_1(a: jax.Array, b: jax.Array) -> jax.Array:
    """1 where a - b is 1 or more, 0 where it is 0 or less; whole numbers in fp32 [64, 64]."""
    if interpreting():
        return jnp.clip(a - b, 0.0, 1.0)

    @reg.inline(arg_types=(LAYOUT, LAYOUT), return_type=plgpu.ShapeDtypeStruct(BLOCK, f32, layout=LAYOUT))
    def run(_, x, y):
        kind, out = ir.F32Type.get(), np.empty_like(x.registers)
        for at in np.ndindex(*out.shape):
            pairs = [(reg.element(x.registers[at], e), reg.element(y.registers[at], e)) for e in range(2)]
            differences = [llvm.inline_asm(kind, p, "sub.sat.f32 $0, $1, $2;", "=f,f,f", asm_dialect=0) for p in pairs]
            out[at] = vector.from_elements(ir.VectorType.get((2,), kind), differences)
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return run(a, b)
