"""The rows of all but the frequent tokens in the embedding's gradient on sm90: one block adds a token's rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.embed.frequent_sm90 import bound, is_frequent, splits
from isojax.pallas_kernels.interpretable import await_previous
from isojax.pallas_kernels.strips import Strip, load, store, strips

f32, i32 = jnp.float32, jnp.int32
WIDEST = 1024  # columns that are added at a time
TOGETHER = 16  # rows that are fetched together
ROWS = 4  # of a fresh gradient that a block writes


def _sum(order, ranked, ct, start, token, s: Strip) -> tuple[jax.Array, jax.Array]:
    """Sum of the token's rows from rank `start` on, ascending, and the rank after them."""
    n = ct.shape[0]
    row = lambda rank: load(ct.at[order[rank]], s).astype(f32)

    def together(carry):
        rank, total = carry
        for value in [row(rank + i) for i in range(TOGETHER)]:
            total = total + value
        return rank + TOGETHER, total

    def single(carry):
        rank, total = carry
        return rank + 1, total + row(rank)

    def more(count):  # the order is sorted: if the last of them is this token, so are the others
        end = lambda rank: jnp.minimum(rank + count, n) - 1
        return lambda carry: (carry[0] + count <= n) & (ranked[end(carry[0])] == token)

    zero = plgpu.layout_cast(jnp.zeros((s.width,), f32), s.layout)
    carry = lax.while_loop(more(TOGETHER), together, (start, zero))
    rank, total = lax.while_loop(more(1), single, carry)
    return total, rank


def write_rows(order: jax.Array, ranked: jax.Array, ct: jax.Array, grad: Any) -> None:
    """Write every row of grad, a ref of fp32 [V, D], but those of frequent tokens: sums, or zeros.

    A kernel of its own, which runs beside the one that writes the others.
    """
    n, columns = ct.shape
    vocab = grad.shape[0]
    cut, blank = strips(columns, ct.dtype, WIDEST), strips(columns, f32, 4 * WIDEST)

    def embed_lookup_bwd(order, ranked, ct, grad):
        token_at = lambda rank: jnp.where(rank < n, ranked[lax.min(rank, n - 1)], vocab)

        def one(i, carry):
            rank, token = carry  # of the next row that is no zero
            here = first + i

            def zeros():
                for s in blank:
                    store(grad.at[here], s, plgpu.layout_cast(jnp.zeros((s.width,), f32), s.layout))
                return rank, token

            def total():
                after = rank
                for s in cut:
                    value, after = _sum(order, ranked, ct, rank, here, s)
                    store(grad.at[here], s, value)
                return after

            def touched():
                skip = lambda: bound(ranked, rank, i32(n), lambda t: t <= here)
                after = lax.cond(is_frequent(ranked, rank, here), skip, total) if splits(n, columns) else total()
                return after, token_at(after)

            real = lambda: lax.cond(token == here, touched, zeros)
            return real() if vocab % ROWS == 0 else lax.cond(here < vocab, real, lambda: carry)

        first = lax.axis_index("block") * ROWS
        rank = bound(ranked, i32(0), i32(n), lambda t: t < first)
        lax.fori_loop(0, ROWS, one, (rank, token_at(rank)))
        await_previous()

    plgpu.kernel(embed_lookup_bwd, out_type=(), grid=(-(-vocab // ROWS),), grid_names=("block",))(
        order, ranked, ct, grad
    )


def add_rows(order: jax.Array, ranked: jax.Array, ct: jax.Array, grad: Any) -> None:
    """Add the sums of all but the frequent tokens to their rows of grad, a ref of fp32 [V, D]."""
    n, columns = ct.shape
    cut = strips(columns, ct.dtype, WIDEST)

    def embed_lookup_bwd(order, ranked, ct, grad):
        start = lax.axis_index("rank")
        token = ranked[start]
        mine = (start == 0) | (ranked[jnp.maximum(start, 1) - 1] != token)
        if splits(n, columns):
            mine &= jnp.logical_not(is_frequent(ranked, start, token))

        @pl.when(mine)
        def _():
            for i, s in enumerate(cut):

                @pl.when(lax.axis_index("part") == i)
                def _(s=s):
                    store(grad.at[token], s, load(grad.at[token], s) + _sum(order, ranked, ct, start, token, s)[0])

        await_previous()

    plgpu.kernel(embed_lookup_bwd, out_type=(), grid=(len(cut), n), grid_names=("part", "rank"))(
        order, ranked, ct, grad
    )
