"""head.logprob_rows on Hopper: every logit comes from memory once and goes back once.

A cluster of blocks takes row after row, a block some of its vocabulary leaves. A leaf falls into parts, which go around
a ring in shared memory. Each slot belongs to a warpgroup, which computes the statistics of the part's tiles and, when
the sums of all leaves are there, subtracts and fetches the next part. Where a block cannot hold its part of a row, it
fetches what is missing once more.
"""

from __future__ import annotations

from typing import NamedTuple

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
from isojax.schedule import LEAVES, VOCAB_TILE

f32 = jnp.float32
CLUSTERS = {2: 66, 4: 30, 8: 14}  # by blocks of a cluster, which lies in one GPC: as many as an H200 runs at a time
ROOM = 224 << 10  # bytes of shared memory for the ring and the statistics
MOST_VOCAB = 1 << 20
MOST_BARRIERS = 32  # that Mosaic has in one array


class Plan(NamedTuple):
    """Blocks of a cluster, parts of a leaf, warpgroups of a block, slots of a warpgroup."""

    blocks: int
    parts: int
    warpgroups: int
    slots: int

    @property
    def leaves(self) -> int:
        """Of a block."""
        return LEAVES // self.blocks

    @property
    def mine(self) -> int:
        """Parts of a row that a warpgroup has."""
        return self.leaves * self.parts // self.warpgroups

    @property
    def again(self) -> int:
        """Of these, first, those that are fetched twice."""
        return max(0, self.mine - self.slots)


def fit(rows: int, vocab: int, blocks: int, parts: int, warpgroups: int) -> Plan:
    """As many slots as there is room for."""
    each = leaf_tiles(vocab)[1]
    leaves, tiles = LEAVES // blocks, -(-each // parts)
    pieces, pitch = leaf_sm90.slot_shape(tiles)
    room = (ROOM - 8 * leaves * parts * tiles) // (4 * pieces * pitch)
    needed = leaves * parts * -(-rows // CLUSTERS[blocks])
    return Plan(blocks, parts, warpgroups, min(room, needed, MOST_BARRIERS) // warpgroups)


def plan(rows: int, vocab: int, blocks: int = 0) -> Plan:
    """Who does what; it changes speed, never bits."""
    each = leaf_tiles(vocab)[1]
    blocks = blocks or next((b for b in (8, 4, 2) if rows <= CLUSTERS[b]), 4)  # all rows at a time, or rows held whole
    least = -(-each // leaf_sm90.MOST_TILES)
    found = [
        fit(rows, vocab, blocks, parts, warpgroups)
        for parts in range(least, min(least + 3, each + 1))
        for warpgroups in (4, 3, 2, 1)
        if LEAVES // blocks * parts % warpgroups == 0 and (parts - 1) * -(-each // parts) < each  # no part is empty
    ]
    best = lambda p: (p.warpgroups < 2, p.again / p.mine, p.slots <= p.mine, -p.warpgroups, p.parts)
    return min((p for p in found if p.slots), key=best)


def logprob_rows(logits, inv_temperature, *, p: Plan | None = None):
    """logits [T, V] fp32, inv_temperature [T] -> log-probabilities [T, V], log-sum-exp [T]."""
    n, vocab = logits.shape
    p = p or plan(n, vocab)
    width, each = leaf_tiles(vocab)
    clusters = min(CLUSTERS[p.blocks], n)
    tiles = -(-each // p.parts)  # of a part
    part_columns = tiles * VOCAB_TILE
    sizes = sorted({min(part_columns, width), width - (p.parts - 1) * part_columns})
    steps = p.mine + p.again  # fetches of a row

    def head_logprob_rows(z, inv_temperature, out, lse, *rest):
        *gmem, ring, tops, masses, smem, arrived, folded, exchanged = rest
        received = gmem[0] if gmem else smem
        cluster, rank, wg = lax.axis_index("cluster"), lax.axis_index("leaf"), lax.axis_index("wg")
        rows = lax.div(n - cluster + clusters - 1, clusters)  # of this cluster
        row_of = lambda k: cluster + k * clusters
        side_of = lambda k: row_of(k) if interpreting() else lax.rem(k, exchange_sm90.SIDES)
        slot_of = lambda q: lax.rem(q, p.slots) * p.warpgroups + wg

        def part(i):
            """This warpgroup's part i of a row: leaf of the block, first tile in it, column in the row, columns."""
            c = i * p.warpgroups + wg
            leaf, tile = lax.div(c, p.parts), lax.rem(c, p.parts) * tiles
            at = tile * VOCAB_TILE
            return leaf, tile, (rank * p.leaves + leaf) * width + at, lax.min(width - at, part_columns)

        def fetch(q):
            k = lax.div(q, steps)
            i = q - k * steps
            begin, columns = part(jnp.where(i < p.mine, i, i - p.mine))[2:]

            @pl.when(k < rows)
            def _():
                slot = slot_of(q)
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
                leaf_sm90.statistics(ring, slot, columns, sizes, inv, tops, masses, leaf * p.parts * tiles + tile)
                if p.again:
                    pl.when(i < p.again)(lambda: refill(q))

            lax.fori_loop(0, p.mine, one, None)

        def fold(k, i):
            at, leaf = i * p.parts * tiles, rank * p.leaves + i
            exchange_sm90.fold(tops, masses, at, each, side_of(k), leaf, received, exchanged, p.blocks)

        def finish(k, inv, norm):
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

        def row(k, inv):
            following = inv_temperature[row_of(lax.min(k + 1, rows - 1))]
            statistics(k, inv)
            pl.when(wg == 0)(lambda: exchange_sm90.await_sums(exchanged))
            plgpu.barrier_arrive(folded)
            plgpu.barrier_wait(folded)
            for i in range(0, p.leaves, p.warpgroups):
                pl.when(i + wg < p.leaves)(lambda i=i: fold(k, i + wg))
            plgpu.barrier_wait(exchanged)
            norm = exchange_sm90.log_sum_exp(received, side_of(k))

            @pl.when((wg == 0) & (rank == 0))
            def _():
                lse[row_of(k)] = norm

            finish(k, inv, norm)
            return following

        for q in range(p.slots):
            fetch(jnp.int32(q))
        lax.fori_loop(0, rows, row, inv_temperature[row_of(0)])

    statistic = plgpu.SMEM((p.leaves * p.parts * tiles,), f32)
    slots = p.slots * p.warpgroups
    return plgpu.kernel(
        head_logprob_rows,
        out_type=(jax.ShapeDtypeStruct((n, vocab), f32), jax.ShapeDtypeStruct((n,), f32), *exchange_sm90.gmem(n)),
        scratch_types=(
            plgpu.SMEM((slots, *leaf_sm90.slot_shape(tiles)), f32),
            statistic,
            statistic,
            plgpu.SMEM((exchange_sm90.SIDES, LEAVES, 2), f32),
            plgpu.Barrier(num_arrivals=leaf_sm90.fetches(), num_barriers=slots),
            plgpu.Barrier(num_arrivals=p.warpgroups),
            exchange_sm90.barrier(p.leaves),
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
