"""head.logprob_rows on Hopper: every logit comes from memory once and goes back once.

A cluster of blocks takes row after row (plan_rows_sm90), a block some of its vocabulary leaves. A leaf falls into
parts, which go around a ring in shared memory. Each slot belongs to a warpgroup, which computes the statistics of the
part's tiles and, when the sums of all leaves are there, subtracts and fetches the next part. Where three rows fit, a
row's sums are on their way while the next one's statistics are computed. Where a block cannot hold its part of a row,
it fetches what is missing once more.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.errors import Unsupported
from isojax.pallas_kernels.head import exchange_sm90, leaf_sm90
from isojax.pallas_kernels.head.kernel_sm90 import check_vocab
from isojax.pallas_kernels.head.lse import leaf_tiles
from isojax.pallas_kernels.head.plan_rows_sm90 import crew
from isojax.schedule import LEAVES, VOCAB_TILE, padded

f32 = jnp.float32
MOST_VOCAB = 1 << 20


def logprob_rows(logits, inv_temperature):
    """logits [T, V] fp32, inv_temperature [T] -> log-probabilities [T, V], log-sum-exp [T]."""
    n, vocab = logits.shape
    p, clusters, late = crew(n, vocab)
    width, each = leaf_tiles(vocab)
    tiles = -(-each // p.parts)  # of a part
    part_columns = tiles * VOCAB_TILE
    sizes = sorted({min(part_columns, width), width - (p.parts - 1) * part_columns})
    steps = p.mine + p.again  # fetches of a row
    sides, pitch = exchange_sm90.sides(p.ahead), padded(p.parts * tiles, 4)  # tiles of a leaf's statistics

    def head_logprob_rows(z, inv_temperature, out, lse, *rest):
        *gmem, ring, tops, masses, smem, arrived, folded, exchanged = rest
        received = gmem[0] if gmem else smem
        cluster, rank, wg = lax.axis_index("cluster"), lax.axis_index("leaf"), lax.axis_index("wg")
        rows = lax.div(n - cluster + clusters - 1, clusters)  # of this cluster
        row_of = lambda k: cluster + k * clusters
        sum_of = lambda k: exchanged.at[lax.rem(k, sides)]
        side_of = lambda k: row_of(k) if interpreting() else lax.rem(k, sides)
        leaf_at = lambda k, leaf: (lax.rem(k, 1 + p.ahead) * p.leaves + leaf) * pitch
        slot_of = lambda q, of=wg: lax.rem(q, p.slots) * p.warpgroups + of

        def part(i, of=wg):
            """A warpgroup's part i of a row: leaf of the block, first tile in it, column in the row, columns."""
            c = i * p.warpgroups + of
            leaf, tile = lax.div(c, p.parts), lax.rem(c, p.parts) * tiles
            at = tile * VOCAB_TILE
            return leaf, tile, (rank * p.leaves + leaf) * width + at, lax.min(width - at, part_columns)

        def fetch(q, of=wg):
            k = lax.div(q, steps)
            i = q - k * steps
            begin, columns = part(jnp.where(i < p.mine, i, i - p.mine), of)[2:]

            @pl.when(k < rows)
            def _():
                slot = slot_of(q, of)
                leaf_sm90.fetch(z, row_of(k), begin, columns, sizes, ring, slot, arrived.at[slot])

        def refill(q):
            plgpu.commit_smem()  # the slot has been read
            fetch(q + p.slots)

        def statistics(k, inv):
            def one(i, _):
                leaf, tile, _, columns = part(i)
                q = k * steps + i
                slot = slot_of(q)
                plgpu.barrier_wait(arrived.at[slot])
                leaf_sm90.statistics(ring, slot, columns, sizes, inv, tops, masses, leaf_at(k, leaf) + tile)
                if p.again:
                    pl.when(i < p.again)(lambda: refill(q))

            lax.fori_loop(0, p.mine, one, None)

        def fold(k, leaf):
            of_row = side_of(k), rank * p.leaves + leaf, received, sum_of(k)
            exchange_sm90.fold(tops, masses, leaf_at(k, leaf), each, *of_row, p.blocks)

        def send(k):
            pl.when(wg == 0)(lambda: exchange_sm90.await_sums(sum_of(k)))
            plgpu.barrier_arrive(folded)
            plgpu.barrier_wait(folded)
            turn = lax.rem(wg + k, p.warpgroups)
            for i in range(0, p.leaves, p.warpgroups):
                pl.when(i + turn < p.leaves)(lambda i=i: fold(k, i + turn))

        def finish(k, inv):
            plgpu.barrier_wait(sum_of(k))
            norm = exchange_sm90.log_sum_exp(received, side_of(k))

            @pl.when((wg == 0) & (rank == 0))
            def _():
                lse[row_of(k)] = norm

            def one(i, q):
                begin, columns = part(i)[2:]
                leaf_sm90.subtract(ring, slot_of(q), columns, sizes, inv, norm, out, row_of(k), begin)
                refill(q)

            def again(i, _):
                q = k * steps + p.mine + i
                plgpu.barrier_wait(arrived.at[slot_of(q)])
                one(i, q)

            lax.fori_loop(p.again, p.mine, lambda i, _: one(i, k * steps + i), None)
            if p.again:
                lax.fori_loop(0, p.again, again, None)

        def step(k, inverses):
            inv = inverses[-1]
            following = inv_temperature[row_of(lax.min(k + 1, rows - 1))]

            @pl.when(k < rows)
            def _():
                statistics(k, inv)
                send(k)

            pl.when(k >= p.ahead)(lambda: finish(k - p.ahead, inverses[0]))
            return (*inverses, following)[1:]

        @pl.when(wg == 0)
        def _():  # by one warpgroup, or another's next row might come first
            if late:
                pl.when(cluster >= clusters // 2)(lambda: leaf_sm90.sleep(late))
            turns = p.slots * p.warpgroups
            lax.fori_loop(0, turns, lambda i, _: fetch(lax.div(i, p.warpgroups), lax.rem(i, p.warpgroups)), None)

        lax.fori_loop(0, rows + p.ahead, step, (inv_temperature[row_of(0)],) * (1 + p.ahead))

    statistic = plgpu.SMEM(((1 + p.ahead) * p.leaves * pitch,), f32)
    slots = p.slots * p.warpgroups
    return plgpu.kernel(
        head_logprob_rows,
        out_type=(jax.ShapeDtypeStruct((n, vocab), f32), jax.ShapeDtypeStruct((n,), f32), *exchange_sm90.gmem(n)),
        scratch_types=(
            plgpu.SMEM((slots, *leaf_sm90.slot_shape(tiles)), f32),
            statistic,
            statistic,
            plgpu.SMEM((sides, LEAVES, 2), f32),
            plgpu.Barrier(num_arrivals=leaf_sm90.fetches(), num_barriers=slots),
            plgpu.Barrier(num_arrivals=p.warpgroups),
            exchange_sm90.barrier(p.leaves, p.ahead),
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(p.blocks,),
        cluster_names=("leaf",),
        num_threads=p.warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=512, unsafe_no_auto_barriers=True),
    )(logits, inv_temperature)[:2]


def logprob_rows_supports(logits, inv_temperature) -> None:
    """What head.logprob_rows takes on sm90; raises Unsupported."""
    region, vocab = "head.logprob_rows", logits.shape[1]
    check_vocab(region, vocab)
    if vocab > MOST_VOCAB:
        given, mend = f"at most {MOST_VOCAB} on sm90 (statistics of all tiles in shared memory)", "use arch cpu"
        raise Unsupported(region, f"V = {vocab}", given, mend)
