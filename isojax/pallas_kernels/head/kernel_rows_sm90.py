"""head.logprob_rows on Hopper: every logit is read once and written once.

A cluster of eight blocks takes row after row, a block one vocabulary leaf of each, which it keeps in shared memory;
as many leaves as fit are there or on their way. Some warpgroups compute the statistics of the leaf's tiles and, when
the sums of all leaves are there, subtract. One more adds the leaf's tiles, sends the sum to the other blocks, and
fetches. While it does, the others are at the statistics of the next row.
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
from isojax.pallas_kernels.head import leaf_sm90
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.kernel_sm90 import check_vocab
from isojax.pallas_kernels.head.lse import MASKED, ROWS, leaf_tiles
from isojax.pallas_kernels.interpretable import publish
from isojax.pallas_kernels.warpgroup import warpgroup_barrier
from isojax.schedule import LEAVES, VOCAB_TILE

f32 = jnp.float32
CLUSTERS = 14  # as many fit on an H200 at a time: a block fills a multiprocessor, a cluster lies in one GPC
SLOTS = 3  # leaves of a block, where they fit
ROOM = 226 << 10  # bytes of shared memory, without barriers and what Mosaic takes
WORKERS = 3  # warpgroups
PIECE = 1024  # logits that a warpgroup subtracts from at a time
FOLD = 16  # tiles whose shares are read together; they are added one after another
MOST_BLOCKS = 6  # of 64 tiles in a leaf


def logprob_rows(logits, inv_temperature):
    """logits [T, V] fp32, inv_temperature [T] -> log-probabilities [T, V], log-sum-exp [T]."""
    n, vocab = logits.shape
    width, each = leaf_tiles(vocab)
    clusters = min(CLUSTERS, n)
    workers = min(WORKERS, -(-each // ROWS))
    rounds = -(-each // (workers * ROWS))
    per = -(-each // (workers * rounds))  # tiles that a worker takes at a time: the rows of one block
    counts = [max(0, min(per, each - first)) for first in range(0, workers * rounds * per, per)]
    tiles = -(-len(counts) * ROWS // strips.THREADS) * strips.THREADS
    slots = min(SLOTS, (ROOM - 4 * VOCAB_TILE - 16 * tiles) // (4 * width), -(-n // clusters))
    lag = min(1, slots - 1)  # rows whose statistics are computed before a row is finished
    cut = strips.strips(width, f32, PIECE)
    pieces = [s for s in cut if s.width == PIECE]

    def head_logprob_rows(z, inv_temperature, out, lse, leaf_top, leaf_mass, leaf, tops, masses, *barriers):
        arrived, read, folded, exchanged = barriers
        cluster, at, wg = lax.axis_index("cluster"), lax.axis_index("leaf"), lax.axis_index("wg")
        begin = at * width
        rows = lax.div(n - cluster + clusters - 1, clusters)  # of this cluster
        row_of = lambda k: cluster + k * clusters

        def fetch(k):
            slot = lax.rem(k, slots)
            leaf_sm90.fetch(z, row_of(k), begin, leaf, slot, arrived.at[slot])

        def statistics(k):
            slot, side = lax.rem(k, slots), lax.rem(k, 2)
            plgpu.barrier_wait(arrived.at[slot])
            for r in range(rounds):
                b = r * workers + wg
                first, count = jnp.minimum(b * per, each - 1), jnp.clip(each - b * per, 1, per)
                mine = pl.ds(b * ROWS, ROWS)
                top, mass = leaf_sm90.statistics(leaf, slot, first, count, inv_temperature[row_of(k)])
                tops[side, mine], masses[side, mine] = top, mass
            plgpu.barrier_arrive(folded.at[side])

        def finish(k):
            slot, side, row = lax.rem(k, slots), lax.rem(k, 2), row_of(k)
            inv = inv_temperature[row]
            plgpu.barrier_wait(exchanged.at[side])
            publish()
            spread = lambda v: jnp.full((ROWS,), v, f32)
            total = shared.log_sum_exp([(spread(leaf_top[row, i]), spread(leaf_mass[row, i])) for i in range(LEAVES)])
            norm = jnp.max(total)  # all are equal

            @pl.when((wg == 0) & (at == 0))
            def _():
                lse[row] = norm

            def subtract(start, s):
                layout = plgpu.Layout.WG_STRIDED((s.width,), s.vec)
                raw = plgpu.load(leaf.at[slot, pl.ds(start, s.width)], layout=layout, optimized=False)
                # the choice, whose outcome no compiler knows, keeps multiply and subtraction from an fma
                scaled = jnp.where(jnp.full(raw.shape, inv) != 0, shared.scaled(raw, inv), 0.0)
                out[row, pl.ds(begin + start, s.width)] = scaled - norm

            if pieces:
                piece = lambda i, _: subtract((i * workers + wg) * PIECE, pieces[0])
                lax.fori_loop(0, lax.div(len(pieces) - wg + workers - 1, workers), piece, None)

            @pl.when(wg == workers - 1)
            def _():
                for s in cut[len(pieces) :]:
                    subtract(s.start, s)

            @pl.when(k + slots < rows)
            def _():
                plgpu.commit_smem()  # the leaf has been read
                plgpu.barrier_arrive(read.at[slot])

        def work(k, _):
            pl.when(k < rows)(lambda: statistics(k))
            pl.when(k >= lag)(lambda: finish(k - lag))

        def serve(k, _):
            side, row, before = lax.rem(k, 2), row_of(k), k - lag
            plgpu.barrier_wait(folded.at[side])
            leaf_top[row, at], leaf_mass[row, at] = _fold(tops.at[side], masses.at[side], counts)
            publish()
            warpgroup_barrier()
            plgpu.barrier_arrive(exchanged.at[side])

            @pl.when((before >= 0) & (before + slots < rows))
            def _():
                plgpu.barrier_wait(read.at[lax.rem(before, slots)])
                fetch(before + slots)

        @pl.when(wg == workers)
        def _():
            for k in range(slots):
                pl.when(k < rows)(functools.partial(fetch, jnp.int32(k)))
            lax.fori_loop(0, rows, serve, None)

        pl.when(wg < workers)(lambda: lax.fori_loop(0, rows + lag, work, None))

    pairs = jax.ShapeDtypeStruct((n, LEAVES), f32)
    # Two of what is handed on between warpgroups: nobody is two rows ahead.
    return plgpu.kernel(
        head_logprob_rows,
        out_type=(jax.ShapeDtypeStruct((n, vocab), f32), jax.ShapeDtypeStruct((n,), f32), pairs, pairs),
        scratch_types=(
            plgpu.SMEM((slots, width), f32),
            *[plgpu.SMEM((2, tiles), f32)] * 2,
            plgpu.Barrier(num_arrivals=1, num_barriers=slots),
            plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
            plgpu.Barrier(num_arrivals=workers, num_barriers=2),
            plgpu.ClusterBarrier(collective_axes=("leaf",), num_barriers=2),
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(LEAVES,),
        cluster_names=("leaf",),
        num_threads=workers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512),
    )(logits, inv_temperature)[:2]


def _fold(tops, masses, counts: list[int]):
    """(max, sum of exp) of a leaf from its tiles', in shared memory; `masses` is overwritten.

    Of each 64 the first `counts` are tiles; the others repeat one, which leaves the maximum alone.
    """
    s = strips.Strip(0, tops.shape[0], 1)
    there = plgpu.broadcasted_iota(jnp.int32, (s.width,), 0, layout=s.layout) < len(counts) * ROWS
    top, mass = jnp.where(there, strips.load(tops, s), MASKED), jnp.where(there, strips.load(masses, s), 0.0)
    leaf_top = jnp.max(top)
    masses[...] = shared.weighed(top, mass, leaf_top)
    warpgroup_barrier()

    def add(total, first, count):
        return functools.reduce(jnp.add, [masses[first + i] for i in range(count)], total)

    total = jnp.float32(0)
    for b, count in enumerate(counts):
        first, whole = b * ROWS, count // FOLD
        total = lax.fori_loop(0, whole, lambda i, t, first=first: add(t, first + i * FOLD, FOLD), total)
        total = add(total, first + whole * FOLD, count % FOLD)
    return leaf_top, total


def logprob_rows_supports(logits, inv_temperature) -> None:
    """What head.logprob_rows takes on sm90; raises Unsupported."""
    region, vocab = "head.logprob_rows", logits.shape[1]
    check_vocab(region, vocab)
    most = LEAVES * MOST_BLOCKS * ROWS * VOCAB_TILE
    if vocab > most:
        raise Unsupported(region, f"V = {vocab}", f"at most {most} on sm90 (a block holds a leaf)", "use arch cpu")
