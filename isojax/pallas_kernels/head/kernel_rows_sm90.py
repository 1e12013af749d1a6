"""head.logprob_rows on Hopper: every logit is read once and written once.

A cluster of eight blocks takes a row, a block one vocabulary leaf of it, which it keeps in shared memory. It computes
the statistics of the leaf's tiles, 64 tiles at a time as the rows of one [64, 128] block; exchanges the leaf's sum with
the other seven; and subtracts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels import strips
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.kernel_sm90 import check_vocab
from isojax.pallas_kernels.head.lse import BLOCK, LAYOUT, MASKED, ROWS, leaf_tiles
from isojax.pallas_kernels.interpretable import publish
from isojax.schedule import LEAVES, VOCAB_TILE

f32 = jnp.float32
BLOCK_SIZE = ROWS * VOCAB_TILE
PIECE = 8  # tiles that a warpgroup subtracts from at a time
FOLD = 16  # tiles whose shares are read together; they are added one after another
MOST_BLOCKS = 6  # of a leaf: what fits in shared memory


def logprob_rows(logits, inv_temperature):
    """logits [T, V] fp32, inv_temperature [T] -> log-probabilities [T, V], log-sum-exp [T]."""
    n, vocab = logits.shape
    width, each = leaf_tiles(vocab)
    blocks = -(-each // ROWS)
    in_block = [min(ROWS, each - b * ROWS) for b in range(blocks)]
    whole, tail = each - 1, width - (each - 1) * VOCAB_TILE

    def head_logprob_rows(z, inv_temperature, out, lse, leaf_top, leaf_mass, leaf, tops, masses, *barriers):
        *arrived, folded, exchanged = barriers
        row, at, wg = lax.axis_index("row"), lax.axis_index("leaf"), lax.axis_index("wg")
        begin = at * width
        inv = inv_temperature[row]

        for b in range(blocks):

            @pl.when(wg == b)
            def _(b=b):
                for i in range(b * ROWS, b * ROWS + in_block[b]):
                    # the last one reaches into the next leaf, or past the end, where zeros are read
                    logits = z.at[pl.ds(row, 1), pl.ds(begin + i * VOCAB_TILE, VOCAB_TILE)]
                    plgpu.copy_gmem_to_smem(logits, leaf.at[pl.ds(i, 1)], arrived[b])
                plgpu.barrier_wait(arrived[b])

        here = wg * BLOCK_SIZE
        raw = plgpu.load(leaf.at[pl.ds(wg * ROWS, ROWS)], layout=LAYOUT, optimized=False)
        tiles = plgpu.broadcasted_iota(jnp.int32, BLOCK, 0, layout=LAYOUT)
        inside = tiles * VOCAB_TILE + shared.columns() < width - here
        mine = pl.ds(wg * ROWS, ROWS)
        top, mass = shared.tile(shared.scaled(raw, inv), inside)[1:]
        tops[mine], masses[mine] = top, mass
        plgpu.barrier_arrive(folded)

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(folded)
            leaf_top[row, at], leaf_mass[row, at] = _fold(tops, masses, each)
            publish()
            plgpu.barrier_arrive(exchanged)

        plgpu.barrier_wait(exchanged)
        publish()
        spread = lambda v: jnp.full((ROWS,), v, f32)
        total = shared.log_sum_exp([(spread(leaf_top[row, i]), spread(leaf_mass[row, i])) for i in range(LEAVES)])
        norm = jnp.max(total)  # all are equal

        @pl.when((wg == 0) & (at == 0))
        def _():
            lse[row] = norm

        def subtracted(t, count):
            """`count` tiles of the leaf from tile t on, as log-probabilities."""
            layout = plgpu.Layout.WG_STRIDED((count, VOCAB_TILE), min(4, count))
            raw = plgpu.load(leaf.at[pl.ds(t, count)], layout=layout, optimized=False)
            # the choice, whose outcome no compiler knows, keeps multiply and subtraction from an fma
            return jnp.where(jnp.full(raw.shape, inv) != 0, shared.scaled(raw, inv), 0.0) - norm

        def write(t, count):
            size = count * VOCAB_TILE
            out[row, pl.ds(begin + t * VOCAB_TILE, size)] = subtracted(t, count).reshape(size)

        for b in range(blocks):  # what other warpgroups fetched
            pl.when(wg != b)(functools.partial(plgpu.barrier_wait, arrived[b]))
        mine = lax.div(whole // PIECE - wg + blocks - 1, blocks)
        lax.fori_loop(0, mine, lambda i, _: write((i * blocks + wg) * PIECE, PIECE), None)

        @pl.when(wg == blocks - 1)
        def _():
            t = whole // PIECE * PIECE
            for size in (4, 1):
                for _ in range((whole - t) // size):
                    write(t, size)
                    t += size
            # the last tile may be cut; a store to `leaf` also tells layout inference soon that it is not swizzled
            leaf[pl.ds(t, 1)] = subtracted(t, 1)
            plgpu.commit_smem()
            to = out.at[pl.ds(row, 1), pl.ds(begin + t * VOCAB_TILE, tail)]
            plgpu.copy_smem_to_gmem(leaf.at[pl.ds(t, 1), pl.ds(0, tail)], to)
            plgpu.wait_smem_to_gmem(0)

    pairs = jax.ShapeDtypeStruct((n, LEAVES), f32)
    out = (jax.ShapeDtypeStruct((n, vocab), f32), jax.ShapeDtypeStruct((n,), f32), pairs, pairs)
    sizes = plgpu.SMEM((blocks * ROWS, VOCAB_TILE), f32), *[plgpu.SMEM((_padded(blocks),), f32)] * 2
    return plgpu.kernel(
        head_logprob_rows,
        out_type=out,
        scratch_types=(
            *sizes,
            *[plgpu.Barrier(num_arrivals=k) for k in in_block],
            plgpu.Barrier(num_arrivals=blocks),
            plgpu.ClusterBarrier(collective_axes=("leaf",)),
        ),
        grid=(n,),
        grid_names=("row",),
        cluster=(LEAVES,),
        cluster_names=("leaf",),
        num_threads=blocks,
        thread_name="wg",
    )(logits, inv_temperature)[:2]


def _padded(blocks: int) -> int:
    """Tiles of a leaf, rounded up to what a warpgroup holds as one vector."""
    return -(-blocks * ROWS // strips.THREADS) * strips.THREADS


def _fold(tops, masses, each: int):
    """(max, sum of exp) of a leaf from its tiles', in shared memory; `masses` is overwritten."""
    s = strips.Strip(0, tops.shape[0], 1)
    real = plgpu.broadcasted_iota(jnp.int32, (s.width,), 0, layout=s.layout) < each
    top, mass = jnp.where(real, strips.load(tops, s), MASKED), jnp.where(real, strips.load(masses, s), 0.0)
    leaf_top = jnp.max(top)
    masses[...] = shared.weighed(top, mass, leaf_top)

    def add(total, first, count):
        return functools.reduce(jnp.add, [masses[first + i] for i in range(count)], total)

    total = lax.fori_loop(0, each // FOLD, lambda i, t: add(t, i * FOLD, FOLD), jnp.float32(0))
    return leaf_top, add(total, each // FOLD * FOLD, each % FOLD)


def logprob_rows_supports(logits, inv_temperature) -> None:
    """What head.logprob_rows takes on sm90; raises Unsupported."""
    region, vocab = "head.logprob_rows", logits.shape[1]
    check_vocab(region, vocab)
    most = LEAVES * MOST_BLOCKS * BLOCK_SIZE
    if vocab > most:
        raise Unsupported(region, f"V = {vocab}", f"at most {most} on sm90 (a block holds a leaf)", "use arch cpu")
