"""The head on Hopper: logits, and log-probabilities fused into the product.

head.logprob runs in three steps. (1) The product; the statistics of each [64-row, 128-column] tile of its
accumulators, max and sum, go to memory: [tiles, T] fp32 each. (2) Tiles are added to leaves, and those by the tree.
(3) Subtract. Memory is O(T): 12 bytes for every 128 columns of a row. kernel_rows_sm90 does the same to given logits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.lse import MASKED, ROW_LAYOUT, ROWS, leaf_tiles
from isojax.pallas_kernels.linear import gemm, tiles
from isojax.pallas_kernels.linear import kernel_sm90 as linear
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.schedule import LEAVES, VOCAB_TILE

f32 = jnp.float32
FOLD = 8  # tiles whose statistics are fetched together while folding
VOCAB_QUANTUM = 64  # a leaf must begin on a multiple of 8 rows of the weight


def rows_of(ref, start):
    """64 values of a per-row vector in memory, laid out as the rows of a block."""
    return plgpu.load(ref.at[pl.ds(start, ROWS)], layout=ROW_LAYOUT, optimized=False)


# -- logits -----------------------------------------------------------------------------------------------------------
def logits(hidden: jax.Array, weight: jax.Array, *, t: Tiles | None = None) -> jax.Array:
    """hidden [T, D] bf16 @ weight[V, D].T -> [T, V] fp32, not rounded."""
    return linear.chains(hidden, weight, t or tiles.for_column(hidden.shape[0], *weight.shape), 1, f32)


# -- step 1 -----------------------------------------------------------------------------------------------------------
def product_stats(hidden, weight, targets, inv_temperature, emit_logits: bool, t: Tiles):
    """Statistics of every tile straight from the accumulators.

    -> max, sum and scaled target logit (-inf where the target is in another tile), [8 leaves * tiles, T] each; then the
    raw logits [T, V] where asked for.
    """
    n, vocab = hidden.shape[0], weight.shape[0]
    width, each = leaf_tiles(vocab)
    groups = -(-each * VOCAB_TILE // t.cols)  # block tiles of a leaf
    rows = -(-n // t.rows)
    wide = gemm.chunk(VOCAB_TILE, width, f32) if emit_logits else 0
    items, at = gemm.snake(t, rows, LEAVES * groups)

    def locate(i):
        r, c = at(i)
        leaf = lax.div(c, groups)
        return gemm.Item(r * t.rows, leaf * width + lax.rem(c, groups) * t.cols, leaf=leaf)

    def body(hidden, weight, targets, inv_temperature, top, total, picked, *rest):
        *out, s = rest

        def block(row, col, leaf, raw):
            begin = col - leaf * width  # in the leaf
            scaled = shared.scaled(raw, shared.along_rows(rows_of(inv_temperature, row)))
            z, m, mass = shared.tile(scaled, shared.columns() < width - begin)
            here = shared.columns() == shared.along_rows(rows_of(targets, row) - col)
            index, at_rows = leaf * each + lax.div(begin, VOCAB_TILE), pl.ds(row, ROWS)
            top[index, at_rows] = m
            total[index, at_rows] = mass
            picked[index, at_rows] = jnp.max(jnp.where(here, z, -jnp.inf), axis=1)
            if emit_logits:
                gemm.store(out[0], s, row, col, raw, limit=(leaf + 1) * width)

        def finish(item, row, col, acc):
            for i in range(0, t.m, ROWS):
                for j in range(0, t.n, VOCAB_TILE):
                    inside = (row + i < n) & (col + j < (item.leaf + 1) * width)

                    @pl.when(inside)
                    def _(i=i, j=j):
                        block(row + i, col + j, item.leaf, acc[i : i + ROWS, j : j + VOCAB_TILE])

        k = hidden.shape[1]
        gemm.product(hidden, weight, s, t, items=items, locate=locate, steps=k // t.k, leaves=1, finish=finish)

    stats = jax.ShapeDtypeStruct((LEAVES * each, n), f32)
    out = (stats, stats, stats) + ((jax.ShapeDtypeStruct((n, vocab), f32),) if emit_logits else ())
    s = gemm.scratch(t, 1, f32, wide)
    return gemm.launch(body, out, t, items, s)(hidden, weight, targets, inv_temperature)


# -- step 2 -----------------------------------------------------------------------------------------------------------
def log_sum_exp(top, total):
    """[8 leaves * tiles, T] max and sum -> natural log-sum-exp [T]. A warpgroup folds a leaf, the first adds all."""
    each, n = top.shape[0] // LEAVES, top.shape[1]

    def body(top, total, out, tops, totals, done):
        row, leaf = lax.axis_index("row") * ROWS, lax.axis_index("wg")

        def over_tiles(step, carry):
            """step(carry, tiles) over the leaf's tiles, ascending, FOLD at a time so that their loads overlap."""
            many = lambda first, count: [leaf * each + first + i for i in range(count)]
            carry = lax.fori_loop(0, each // FOLD, lambda i, c: step(c, many(i * FOLD, FOLD)), carry)
            return step(carry, many(each // FOLD * FOLD, each % FOLD))

        def largest(m, at):
            return functools.reduce(jnp.maximum, [rows_of(top.at[i], row) for i in at], m)

        def add(mass, at):
            parts = [shared.weighed(rows_of(top.at[i], row), rows_of(total.at[i], row), m) for i in at]
            return functools.reduce(jnp.add, parts, mass)

        start = lambda v: plgpu.layout_cast(jnp.full((ROWS,), v, f32), ROW_LAYOUT)
        m = over_tiles(largest, start(MASKED))
        tops[leaf], totals[leaf] = m, over_tiles(add, start(0.0))
        plgpu.barrier_arrive(done)

        @pl.when(leaf == 0)
        def _():
            plgpu.barrier_wait(done)
            out[pl.ds(row, ROWS)] = shared.log_sum_exp(
                [(rows_of(tops.at[i], 0), rows_of(totals.at[i], 0)) for i in range(LEAVES)]
            )

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n,), f32),
        scratch_types=(
            plgpu.SMEM((LEAVES, ROWS), f32),
            plgpu.SMEM((LEAVES, ROWS), f32),
            plgpu.Barrier(num_arrivals=LEAVES),
        ),
        grid=(n // ROWS,),
        grid_names=("row",),
        num_threads=LEAVES,
        thread_name="wg",
    )(top, total)


# -- step 3 -----------------------------------------------------------------------------------------------------------
def subtract_picked(picked, targets, lse, vocab: int):
    """The target's scaled logit, read from the tile that holds it, minus lse: [T]. One block a row."""
    width, each = leaf_tiles(vocab)

    def body(picked, targets, lse, out):
        row = lax.axis_index("row")
        target = jnp.clip(targets[row], 0, vocab - 1)  # nothing is read out of bounds, whatever the caller passed
        leaf = lax.div(target, width)
        out[row] = picked[leaf * each + lax.div(target - leaf * width, VOCAB_TILE), row] - lse[row]

    n = targets.shape[0]
    out = jax.ShapeDtypeStruct((n,), f32)
    return plgpu.kernel(body, out_type=out, grid=(n,), grid_names=("row",))(picked, targets, lse)


# -- the region -------------------------------------------------------------------------------------------------------
def logprob(hidden, weight, targets, inv_temperature, *, emit_logits: bool, t: Tiles | None = None):
    """hidden [T, D], weight [V, D] bf16, targets [T] int32, inv_temperature [T] -> logprob [T], log-sum-exp [T]
    (, raw logits [T, V])."""
    t = t or tiles.for_vocabulary(*hidden.shape, emit_logits=emit_logits)
    top, total, picked, *raw = product_stats(hidden, weight, targets, inv_temperature, emit_logits, t)
    lse = log_sum_exp(top, total)
    return subtract_picked(picked, targets, lse, weight.shape[0]), lse, *raw


def check_vocab(region: str, vocab: int) -> None:
    """Raise Unsupported unless the vocabulary falls into leaves that begin where TMA can."""
    if vocab % VOCAB_QUANTUM:
        mend = "use arch cpu; rows added to the vocabulary would enter the softmax"
        raise Unsupported(region, f"V = {vocab}", f"V a multiple of {VOCAB_QUANTUM} on sm90 (TMA tiles)", mend)


def logits_supports(hidden, weight) -> None:
    """What head.logits takes on sm90; raises Unsupported."""
    linear.supports("head.logits", hidden, weight)


def logprob_supports(hidden, weight, targets, inv_temperature, *, emit_logits) -> None:
    """What head.logprob takes on sm90; raises Unsupported."""
    linear.supports("head.logprob", hidden, weight)
    check_vocab("head.logprob", weight.shape[0])
