"""The log-sum-exp that head.logprob and head.logprob_rows share, down to the instruction.

Both must give the same bits, one from accumulators and one from logits in memory. So they share these functions and
the layout they run in: [64, 128] blocks as wgmma leaves them, since Mosaic's tree of register additions depends on it.
What a compiler could do to one and not to the other is fenced. The schedule is stated in isojax.pallas_kernels.head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.head.reference import MASKED
from isojax.schedule import LN2, LOG2E, VOCAB_TILE, tree, vocab_leaves

ROWS = 64  # height of a block: one warpgroup, always
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)

BLOCK = (ROWS, VOCAB_TILE)


def leaf_tiles(vocab: int) -> tuple[int, int]:
    """(columns, tiles) of each vocabulary leaf, all equal: vocab is a multiple of 8."""
    width = vocab_leaves(vocab)[0][1]
    return width, -(-width // VOCAB_TILE)


def along_rows(v: jax.Array) -> jax.Array:
    """[64] -> [64, 128]."""
    return lax.broadcast_in_dim(v, BLOCK, [0])


def scaled(raw: jax.Array, inv_temperature: jax.Array) -> jax.Array:
    """raw times 1/T: one fp32 multiply. To be masked before anything is subtracted, which keeps the two from an fma."""
    return lax.optimization_barrier(raw * inv_temperature)


def columns() -> jax.Array:
    """The column index of each element of a block, int32 [64, 128]."""
    return plgpu.broadcasted_iota(jnp.int32, BLOCK, 1, layout=LAYOUT)


def tile(z: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Statistics of 64 times 128 logits: the tiles of 64 rows, or 64 tiles of a row. Only those `inside` count.

    z [64, 128] fp32, scaled -> (z masked, max [64], sum of exp2((z - max) log2 e) [64]).
    """
    z = jnp.where(inside, z, -jnp.inf)
    top = jnp.maximum(jnp.max(z, axis=1), MASKED)
    return z, top, jnp.sum(jnp.exp2((z - along_rows(top)) * LOG2E), axis=1)


def weighed(top: jax.Array, mass: jax.Array, leaf_top: jax.Array) -> jax.Array:
    """A tile's share in its leaf's sum. An empty tile's is 0; the choice also keeps the product from an fma."""
    return jnp.where(mass == 0, 0.0, mass * jnp.exp2((top - leaf_top) * LOG2E))


def combine(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two (max, sum of exp) pairs into one; a is the lower part of the vocabulary.

    Only the smaller one is rescaled (the other's factor is exactly 1), which also leaves one way to contract to FMA.
    """
    first = a[0] >= b[0]
    top = jnp.maximum(a[0], b[0])
    low = jnp.minimum(a[0], b[0])
    kept, faded = jnp.where(first, a[1], b[1]), jnp.where(first, b[1], a[1])
    return top, kept + faded * jnp.exp2((low - top) * LOG2E)


def log_sum_exp(leaves: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Natural log-sum-exp of the (max, sum of exp) of the eight leaves."""
    top, mass = tree(leaves, combine)
    return top + jnp.log2(mass) * LN2
