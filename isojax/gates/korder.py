"""Design rule 2, rechecked on a GPU: with one K order and one fp32 accumulator, the instruction does not show.

wgmma (head.logits), mma.sync, and either one with its operands swapped must give the same bits. Tile shapes, stages and
warpgroups are swept by the gate of linear.column ("any cut"). The control cuts K in two chains.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.gates.bits import compare
from isojax.gates.case import ill_conditioned
from isojax.gates.run import device
from isojax.pallas_kernels.head import kernel_sm90

TILE, STEP = 64, 64


def mma_sync(a: jax.Array, b: jax.Array) -> jax.Array:
    """a [M, K] @ b[N, K].T in fp32 by mma.sync m16n8k16, one warpgroup per 64 x 64 tile. M, N, K multiples of 64."""
    (m, k), n = a.shape, b.shape[0]
    layout = plgpu.Layout

    def body(a, b, out):
        rows = pl.ds(lax.axis_index("m") * TILE, TILE)
        columns = pl.ds(lax.axis_index("n") * TILE, TILE)

        def step(i, acc):
            along = pl.ds(i * STEP, STEP)
            left = plgpu.load(a.at[rows, along], layout=layout.MMA_LHS(a.dtype, m_warps=4), optimized=False)
            right = plgpu.load(b.at[columns, along].T, layout=layout.MMA_RHS(b.dtype, m_warps=4), optimized=False)
            return plgpu.mma(acc, left, right)

        acc = plgpu.layout_cast(jnp.zeros((TILE, TILE), jnp.float32), layout.MMA_ACC(a.dtype, m_warps=4))
        out[rows, columns] = lax.fori_loop(0, k // STEP, step, acc)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        grid=(m // TILE, n // TILE),
        grid_names=("m", "n"),
    )(a, b)


def check(rng: np.random.Generator, m: int = 128, n: int = 256, k: int = 2048) -> dict[str, Any]:
    """Elements that differ between the instructions, which must be 0, and for the control, which must not."""
    gpu = device("sm90")
    a, b = (jax.device_put(ill_conditioned(rng, r, k), gpu) for r in (m, n))
    wgmma, sync = jax.jit(kernel_sm90.logits), jax.jit(mma_sync)
    whole = np.asarray(wgmma(a, b))
    differ = lambda x: compare(np.ascontiguousarray(np.asarray(x)), whole).differing
    halves = functools.reduce(
        np.add, [np.asarray(wgmma(a[:, i : i + k // 2], b[:, i : i + k // 2])) for i in (0, k // 2)]
    )
    return dict(
        elements=m * n,
        mma_sync=differ(sync(a, b)),
        wgmma_swapped=differ(np.asarray(wgmma(b, a)).T),
        mma_sync_swapped=differ(np.asarray(sync(b, a)).T),
        control_two_chains=differ(halves),
    )
