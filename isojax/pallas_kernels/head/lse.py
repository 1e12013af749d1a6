"""The log-sum-exp that head.logprob and head.logprob_rows share, down to the instruction.

Both must give the same bits, one from accumulators and one from logits in memory. So they share these functions, the
layout they run in ([64, 128] blocks as wgmma leaves them: Mosaic's tree of register additions depends on it), and, from
the statistics of a tile on, whole kernels. What a compiler could do to one and not to the other is fenced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.schedule import LOG2E, VOCAB_TILE

ROWS = 64  # height of a block: one warpgroup, always
MASKED = -1e30  # least maximum of a tile, so that a fully masked one counts for nothing
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)

BLOCK = (ROWS, VOCAB_TILE)


def along_rows(v: jax.Array) -> jax.Array:
    """[64] -> [64, 128]."""
    return lax.broadcast_in_dim(v, BLOCK, [0])


def scaled(raw: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    """raw [64, 128] times 1/T [64]: one fp32 multiply, fenced so that no later subtraction contracts with it."""
    return lax.optimization_barrier(raw * along_rows(inv_temperature))


def columns() -> jax.Array:
    """The column index of each element of a block, int32 [64, 128]."""
    return plgpu.broadcasted_iota(jnp.int32, BLOCK, 1, layout=LAYOUT)


def tile(raw: jax.Array, inv_temperature: jax.Array, width: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statistics of one vocabulary tile, of which the first `width` columns count.

    raw [64, 128] fp32 logits -> (z [64, 128] scaled and masked, max [64], sum of exp2((z - max) log2 e) [64]).
    """
    z = jnp.where(columns() < width, scaled(raw, inv_temperature), -jnp.inf)
    top = jnp.maximum(jnp.max(z, axis=1), MASKED)
    return z, top, jnp.sum(jnp.exp2((z - along_rows(top)) * LOG2E), axis=1)


def combine(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two (max, sum of exp) pairs into one; a is the lower part of the vocabulary.

    Only the smaller one is rescaled (the other's factor is exactly 1), which also leaves one way to contract to FMA.
    """
    first = a[0] >= b[0]
    top = jnp.maximum(a[0], b[0])
    low = jnp.minimum(a[0], b[0])
    kept, faded = jnp.where(first, a[1], b[1]), jnp.where(first, b[1], a[1])
    return top, kept + faded * jnp.exp2((low - top) * LOG2E)
