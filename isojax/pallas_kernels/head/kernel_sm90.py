"""The head on Hopper: logits, log-probabilities of given logits, and log-probabilities fused into the product.

Both kinds of log-probability run in three steps. (1) The statistics of each [64-row, 128-column] tile, max and sum, to
memory: [tiles, T] fp32 each, where head.logprob computes tiles from its accumulators and head.logprob_rows loads them.
(2) One kernel, the same module for both, folds a leaf's tiles in ascending order and adds the leaves by the tree.
(3) Subtract. Memory is O(T) in the fused form: 12 bytes for every 128 columns of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.lse import LAYOUT, MASKED, ROW_LAYOUT, ROWS
from isojax.pallas_kernels.linear import gemm, tiles
from isojax.pallas_kernels.linear import kernel_sm90 as linear
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.schedule import LEAVES, LN2, VOCAB_TILE, tree

f32 = jnp.float32
FOLD = 8  # tiles whose statistics are fetched together while folding
VOCAB_QUANTUM = 64  # a leaf must begin on a multiple of 8 rows of the weight


def rows_of(ref, start):
    """64 values of a per-row vector in memory, laid out as the rows of a block."""
    return plgpu.load(ref.at[pl.ds(start, ROWS)], layout=ROW_LAYOUT, optimized=False)


def leaf_tiles(vocab: int) -> tuple[int, int]:
    """(columns, tiles) of each vocabulary leaf."""
    width = vocab // LEAVES
    return width, -(-width // VOCAB_TILE)


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
            z, m, mass = shared.tile(raw, rows_of(inv_temperature, row), width - begin)
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


def row_stats(logits, inv_temperature):
    """Statistics of every tile of given logits [T, V] -> max and sum, [8 leaves * tiles, T] each. One block a tile."""
    n, vocab = logits.shape
    width, each = leaf_tiles(vocab)

    def body(z, inv_temperature, top, total, buffer, arrived):
        row, leaf, j = (lax.axis_index(a) for a in ("row", "leaf", "tile"))
        row, begin = row * ROWS, j * VOCAB_TILE
        at_rows = pl.ds(row, ROWS)
        plgpu.copy_gmem_to_smem(z.at[at_rows, pl.ds(leaf * width + begin, VOCAB_TILE)], buffer, arrived)
        inv = rows_of(inv_temperature, row)
        plgpu.barrier_wait(arrived)
        raw = plgpu.load(buffer, layout=LAYOUT, optimized=False)
        _, top[leaf * each + j, at_rows], total[leaf * each + j, at_rows] = shared.tile(raw, inv, width - begin)

    stats = jax.ShapeDtypeStruct((LEAVES * each, n), f32)
    return plgpu.kernel(
        body,
        out_type=(stats, stats),
        scratch_types=block_scratch(gemm.chunk(VOCAB_TILE, width, f32)),
        grid=(each, LEAVES, n // ROWS),
        grid_names=("tile", "leaf", "row"),
    )(logits, inv_temperature)


def block_scratch(wide):
    """One [64, 128] block of fp32 in shared memory and the barrier of its arrival."""
    return plgpu.SMEM(shared.BLOCK, f32, transforms=gemm.tiled(wide, f32)), plgpu.Barrier()


# -- step 2 -----------------------------------------------------------------------------------------------------------
def log_sum_exp(top, total):
    """[8 leaves * tiles, T] max and sum -> natural log-sum-exp [T]. A warpgroup folds a leaf, the first adds all."""
    each, n = top.shape[0] // LEAVES, top.shape[1]

    def body(top, total, out, tops, totals, done):
        row, leaf = lax.axis_index("row") * ROWS, lax.axis_index("wg")

        def fold(first, count, carry):
            at = [leaf * each + first + i for i in range(count)]
            for pair in [(rows_of(top.at[i], row), rows_of(total.at[i], row)) for i in at]:
                carry = shared.combine(carry, pair)
            return carry

        start = [plgpu.layout_cast(jnp.full((ROWS,), v, f32), ROW_LAYOUT) for v in (MASKED, 0.0)]
        carry = lax.fori_loop(0, each // FOLD, lambda i, c: fold(i * FOLD, FOLD, c), tuple(start))
        tops[leaf], totals[leaf] = fold(each // FOLD * FOLD, each % FOLD, carry)
        plgpu.barrier_arrive(done)

        @pl.when(leaf == 0)
        def _():
            plgpu.barrier_wait(done)
            m, mass = tree([(rows_of(tops.at[i], 0), rows_of(totals.at[i], 0)) for i in range(LEAVES)], shared.combine)
            out[pl.ds(row, ROWS)] = m + jnp.log2(mass) * LN2

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
def subtract_rows(logits, inv_temperature, lse):
    """logits * inv_temperature - lse, [T, V]."""
    n, vocab = logits.shape

    def body(z, inv_temperature, lse, out, buffer, arrived):
        row, col = lax.axis_index("row") * ROWS, lax.axis_index("col") * VOCAB_TILE
        at = pl.ds(row, ROWS), pl.ds(col, VOCAB_TILE)
        plgpu.copy_gmem_to_smem(z.at[at], buffer, arrived)
        inv, norm = rows_of(inv_temperature, row), rows_of(lse, row)
        plgpu.barrier_wait(arrived)
        raw = plgpu.load(buffer, layout=LAYOUT)
        # Through shared memory, so that z is rounded as in the fused form: registers would contract to an fma
        buffer[...] = shared.scaled(raw, inv)
        plgpu.commit_smem()
        buffer[...] = plgpu.load(buffer, layout=LAYOUT) - shared.along_rows(norm)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out.at[at])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, vocab), f32),
        scratch_types=block_scratch(gemm.chunk(VOCAB_TILE, vocab, f32)),
        grid=(-(-vocab // VOCAB_TILE), n // ROWS),
        grid_names=("col", "row"),
    )(logits, inv_temperature, lse)


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


# -- the regions ------------------------------------------------------------------------------------------------------
def logprob_rows(logits, inv_temperature):
    """logits [T, V] fp32, inv_temperature [T] -> log-probabilities [T, V], log-sum-exp [T]."""
    lse = log_sum_exp(*row_stats(logits, inv_temperature))
    return subtract_rows(logits, inv_temperature, lse), lse


def logprob(hidden, weight, targets, inv_temperature, *, emit_logits: bool, t: Tiles | None = None):
    """hidden [T, D], weight [V, D] bf16, targets [T] int32, inv_temperature [T] -> logprob [T], log-sum-exp [T]
    (, raw logits [T, V])."""
    t = t or tiles.for_vocabulary(*hidden.shape, emit_logits=emit_logits)
    top, total, picked, *raw = product_stats(hidden, weight, targets, inv_temperature, emit_logits, t)
    lse = log_sum_exp(top, total)
    return subtract_picked(picked, targets, lse, weight.shape[0]), lse, *raw


def _check_vocab(region: str, vocab: int) -> None:
    if vocab % VOCAB_QUANTUM:
        mend = "use arch cpu; rows added to the vocabulary would enter the softmax"
        raise Unsupported(region, f"V = {vocab}", f"V a multiple of {VOCAB_QUANTUM} on sm90 (TMA tiles)", mend)


def logits_supports(hidden, weight) -> None:
    """What head.logits takes on sm90; raises Unsupported."""
    linear.supports("head.logits", hidden, weight)


def logprob_rows_supports(logits, inv_temperature) -> None:
    """What head.logprob_rows takes on sm90; raises Unsupported."""
    region, (rows, vocab) = "head.logprob_rows", logits.shape
    if rows % ROWS or not rows:
        raise Unsupported(
            region, f"T = {rows}", "a positive multiple of 64 on sm90", "pad the rows; they change nothing"
        )
    _check_vocab(region, vocab)


def logprob_supports(hidden, weight, targets, inv_temperature, *, emit_logits) -> None:
    """What head.logprob takes on sm90; raises Unsupported."""
    linear.supports("head.logprob", hidden, weight)
    _check_vocab("head.logprob", weight.shape[0])
