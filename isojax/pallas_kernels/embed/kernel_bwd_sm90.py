"""Hopper kernels of the embedding's gradient, without atomics: sort the positions by token, then add each token's rows.

(1) A position's rank is how many positions come before it in the order (token, position): one warpgroup counts for 64
positions by comparing integers with all T. (2) A block that finds the first position of a token adds that token's rows,
ascending, and writes one row of the table's gradient; the other rows are zeros filled in before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.strips import THREADS, check_rows, load, store, strips

f32, i32 = jnp.float32, jnp.int32
POSITIONS = 64  # that a warpgroup ranks, and that it compares them with at a time
MOST_POSITIONS = 1 << 17  # ranking is quadratic
WIDEST = 1024  # columns that a block adds
TOGETHER = 16  # rows of a frequent token that are fetched together
BLOCK = (POSITIONS, POSITIONS)
ROW, COLUMN = (plgpu.Layout.WGMMA.reduce(axis) for axis in (1, 0))


def lookup_bwd_supports(tokens, ct, into=None, *, vocab):
    check_rows("embed.lookup_bwd", ct, columns=ct.shape[1], widest=65536)
    if into is not None and ct.shape[1] % THREADS:  # strips would overlap, and add twice
        given, mend = f"{ct.shape[1]} columns with `into`", "add the gradient afterwards"
        raise Unsupported("embed.lookup_bwd", given, f"a multiple of {THREADS} on sm90", mend)
    n = tokens.shape[0]
    if n % POSITIONS or n > MOST_POSITIONS:
        mend = "pad with rows whose ct is zero, or split the batch and add the gradients"
        raise Unsupported("embed.lookup_bwd", f"{n} tokens", f"a multiple of 64, at most {MOST_POSITIONS}", mend)


def lookup_bwd(tokens, ct, into=None, *, vocab):
    columns = ct.shape[1]
    order, ranked = sort(tokens)
    grad = jax.new_ref(jnp.zeros((vocab, columns), f32) if into is None else into)
    add_rows(order, ranked, ct, grad, adding=into is not None)
    return jax.freeze(grad)


def sort(tokens):
    """tokens [T] -> positions ordered by (token, position), and the tokens in that order; int32 [T] each."""
    n = tokens.shape[0]

    def embed_sort(tokens, order, ranked, ranks):
        tile = lax.axis_index("tile")
        first = tile * POSITIONS
        along = lambda v, axis: lax.broadcast_in_dim(v, BLOCK, [axis])
        read = lambda at, layout: plgpu.load(tokens.at[pl.ds(at, POSITIONS)], layout=layout, optimized=False)
        own = read(first, ROW)

        def compare(j, count):
            # equal tokens count where they stand before: a whole block of them does, or none of it
            limit = along(own + jnp.where(j < tile, 1, 0), 0)
            return count + jnp.where(along(read(j * POSITIONS, COLUMN), 1) < limit, 1, 0)

        count = plgpu.layout_cast(jnp.zeros(BLOCK, i32), plgpu.Layout.WGMMA)
        count = lax.fori_loop(0, n // POSITIONS, compare, count)
        row, column = (plgpu.broadcasted_iota(i32, BLOCK, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1))
        earlier = (along(read(first, COLUMN), 1) == along(own, 0)) & (column < row)
        ranks[...] = jnp.sum(count + jnp.where(earlier, 1, 0), axis=1)

        def place(i, _):
            rank = ranks[i]
            order[rank] = first + i
            ranked[rank] = tokens[first + i]

        lax.fori_loop(0, POSITIONS, place, None)

    out = jax.ShapeDtypeStruct((n,), i32)
    return plgpu.kernel(
        embed_sort,
        out_type=(out, out),
        scratch_types=(plgpu.SMEM((POSITIONS,), i32),),
        grid=(n // POSITIONS,),
        grid_names=("tile",),
    )(tokens)


def add_rows(order, ranked, ct, grad, adding=False):
    """Write the sum of each token's rows of ct [T, D] to its row of grad, a ref of fp32 [V, D], or add it there."""
    n, columns = ct.shape
    cut = strips(columns, ct.dtype, WIDEST)
    parts = [[s] for s in cut if s.width == WIDEST] or [[]]
    parts[-1] += [s for s in cut if s.width != WIDEST]  # one block: the last strip may overlap the one before

    def add(order, ranked, ct, grad, s):
        start = lax.axis_index("rank")
        token = ranked[start]
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
        _, total = lax.while_loop(more(1), single, carry)
        store(grad.at[token], s, load(grad.at[token], s) + total if adding else total)

    def embed_lookup_bwd(order, ranked, ct, grad):
        start = lax.axis_index("rank")

        @pl.when((start == 0) | (ranked[jnp.maximum(start, 1) - 1] != ranked[start]))
        def _():
            for i, part in enumerate(parts):

                @pl.when(lax.axis_index("part") == i)
                def _(part=part):
                    for s in part:
                        add(order, ranked, ct, grad, s)

    plgpu.kernel(embed_lookup_bwd, out_type=(), grid=(len(parts), n), grid_names=("part", "rank"))(
        order, ranked, ct, grad
    )
