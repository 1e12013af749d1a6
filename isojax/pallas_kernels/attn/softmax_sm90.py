"""The softmax schedule of attn.core on one warpgroup's 64 rows: what every sm90 kernel of the region shares.

Between a product and the sum that it feeds stands a select, everywhere: Mosaic's PTX says mul.f32 and add.f32, which
LLVM and ptxas may contract to an FMA or not, depending on the code around them, and the bits must not depend on which
kernel a step is in. (lax.optimization_barrier stops LLVM only: ptxas sees nothing of it.) The reductions over the 64
keys run on one layout and one tile height everywhere: their tree depends on both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn.reference import MASKED
from isojax.schedule import KV_TILE, LOG2E

ROWS = 64  # rows of one warpgroup's MMA
PANEL = 64  # columns of a head held together (isojax.pallas_kernels.interpretable.panels)
f32 = jnp.float32
TILE = plgpu.Layout.WGMMA
ROW = TILE.reduce(1)

# m [64], den [64], and acc [64, D] as panels of 64 columns: fp32, in registers
State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]


def fresh(head_dim: int) -> State:
    """The state before any key."""
    return (
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, f32), ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), f32), ROW),
        tuple(plgpu.layout_cast(jnp.zeros((ROWS, PANEL), f32), TILE) for _ in range(head_dim // PANEL)),
    )


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x * factor, rounded; factor >= 0, as the compiler cannot know."""
    return jnp.where(factor >= 0.0, x * factor, 0.0)


def spread(row: jax.Array) -> jax.Array:
    """[64] -> [64, 64]."""
    return lax.broadcast_in_dim(row, (ROWS, PANEL), (0,))


def weigh(scores: jax.Array, m: jax.Array, den: jax.Array, limit: jax.Array, *, scale: float):
    """One tile of raw scores [64, 64] -> (m, den, alpha [64], p [64, 64]).

    limit [64]: the last key of the tile that a row sees; what it does not see is replaced, whatever it was.
    """
    key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KV_TILE), 1, layout=TILE)
    s = jnp.where(key <= spread(limit), scores * (scale * LOG2E), -jnp.inf)
    top = jnp.maximum(m, s.max(axis=1))
    alpha, p = jnp.exp2(m - top), jnp.exp2(s - spread(top))
    return top, scaled(den, alpha) + p.sum(axis=1), alpha, p


def fold(total: State, part: State) -> State:
    """Add one finished partition to those before it."""
    (big_m, big_den, big_acc), (m, den, acc) = total, part
    top = jnp.maximum(big_m, m)
    old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
    wide_old, wide_new = spread(old), spread(new)
    folded = tuple(scaled(a, wide_old) + scaled(b, wide_new) for a, b in zip(big_acc, acc, strict=True))
    return top, scaled(big_den, old) + scaled(den, new), folded


def finish(total: State) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """-> (panels of out [64, D] bf16, log-sum-exp in base 2 [64])."""
    m, den, acc = total
    some = jnp.where(den > 0.0, den, 1.0)
    inverse = spread(jnp.where(den > 0.0, 1.0 / some, 0.0))
    return tuple((a * inverse).astype(jnp.bfloat16) for a in acc), m + jnp.log2(some)
