"""attn.core on Hopper for one query row a request: streaming keys and values as fast as memory gives them.

A program of one warpgroup takes some partitions of one row and KV head and writes the state of each; a second kernel
folds them in ascending order. How many programs share a row follows from the rows that are really there, which the
programs count: an engine's batch of one sequence is padded to 64 rows. It changes no bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels import warpgroup as wg
from isojax.pallas_kernels.attn import softmax_sm90 as softmax
from isojax.pallas_kernels.attn import tiles_sm90 as tiles
from isojax.pallas_kernels.attn.tiles_sm90 import Rows, Shape
from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.interpretable import await_previous, let_next_start, panels, views
from isojax.schedule import padded

i32, f32 = jnp.int32, jnp.float32
PARAMS = plgpu.CompilerParams(approx_math=True)
BATCH = 8  # partitions that the fold kernel brings at a time
AHEAD = 4  # such batches in flight


@dataclass(frozen=True)
class Tuning:
    """What changes speed and never bits."""

    places: int = 0  # tiles of keys or of values in flight or in use; 0: what `places_of` takes
    programs: int = 8 * SMS  # rows are split until there are about so many


def decode(q, kv, table, cu_q, lens, work, *, scale: float, shape: Shape, tuning: Tuning = Tuning()):
    """-> out [T, Hq D], lse [T, Hq]. The keys are in pages: `supports` refuses others."""
    q = q.reshape(shape.tokens * shape.q_heads, shape.head_dim)
    states = _partials(shape, scale, tuning)(q, kv, cu_q, lens, work, table)
    return _folded(shape)(*states, cu_q, lens, work)


def splits_of(s: Shape, rows: int, programs: int) -> int:
    """Programs that share the partitions of one of `rows` rows."""
    return max(1, min(s.partitions, -(-programs // (rows * s.blocks))))


def splits_there(s: Shape, rows: jax.Array, programs: int) -> jax.Array:
    """`splits_of` on the device, where there may be no row."""
    blocks = lax.max(rows * s.blocks, i32(1))
    return lax.max(i32(1), lax.min(i32(s.partitions), lax.div(blocks + (programs - 1), blocks)))


def grid_of(s: Shape, programs: int) -> int:
    """Programs enough for any number of rows."""
    return max(rows * s.blocks * splits_of(s, rows, programs) for rows in range(1, s.items + 1))


def places_of(s: Shape, grid: int) -> int:
    """3, so that two programs fit a multiprocessor; where there are that few programs, as much as one can hold."""
    return 6 if grid <= SMS else 3


def _state_heads(s: Shape) -> int:
    """Heads in one state: even, which keeps its rows on 16 bytes and its lines whole."""
    return padded(s.heads, 2)


def _finished(rows: Rows) -> jax.Array:
    """Partitions of the request."""
    steps = rows.shape.steps
    return lax.div(rows.kv_tiles + (steps - 1), i32(steps))


@dataclass(frozen=True)
class Walk:
    """The tiles of one program, in order: those of partition `split`, then of the one `splits` further, and so on."""

    rows: Rows
    split: jax.Array
    splits: jax.Array

    @property
    def tiles(self) -> jax.Array:
        s, all_ = self.rows.shape, _finished(self.rows)
        mine = lax.div(all_ - self.split + (self.splits - 1), i32(self.splits))
        has_last = lax.rem(all_ - 1 - self.split, i32(self.splits)) == 0
        return mine * s.steps - jnp.where(has_last, all_ * s.steps - self.rows.kv_tiles, 0)

    def partition(self, i) -> jax.Array:
        return self.split + lax.div(i, i32(self.rows.shape.steps)) * self.splits

    def tile(self, i) -> jax.Array:
        steps = self.rows.shape.steps
        return self.partition(i) * steps + lax.rem(i, i32(steps))


def _partials(s: Shape, scale: float, tuning: Tuning):
    """-> fp32 states per (item, block, partition): sums [heads D], and ends [2 heads]: m, then den."""
    heads = _state_heads(s)
    lead = (s.items, s.blocks, s.partitions)
    grid = grid_of(s, tuning.programs)
    ring = tuning.places or places_of(s, grid)

    def body(q, kv, cu_q, lens, work, table, sums, ends, *, q_smem, kv_smem, q_ready, ready):
        program, there = lax.axis_index("program"), cu_q[cu_q.shape[0] - 1]  # the work list names one row an item
        let_next_start()  # the fold: its start is hidden behind this kernel
        splits = splits_there(s, there, tuning.programs)
        unit, split = lax.div(program, splits), lax.rem(program, splits)
        item, block = lax.div(unit, i32(s.blocks)), lax.rem(unit, i32(s.blocks))

        @pl.when(item < there)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)
            walk = Walk(rows, split, splits)

            @pl.when(split < _finished(rows))
            def _():
                count = walk.tiles

                def fetch(i, half: int, at) -> None:
                    """Bring tile i's keys, unit 2 i of the ring, or its values, unit 2 i + 1, from `at`."""
                    slot, landing = lax.rem(2 * i + half, i32(ring)), views(kv_smem)[1]
                    bring = lambda: tiles.fetch_kv(rows, kv, at, half, landing.at[slot], ready.at[slot])
                    pl.when(i < count)(bring)

                def use(unit):
                    slot = lax.rem(unit, i32(ring))
                    plgpu.barrier_wait(ready.at[slot])
                    return views(kv_smem)[0].at[slot]

                places = lambda i: tiles.places(rows, table, walk.tile(i))
                tiles.fetch_q(rows, q, views(q_smem)[1], q_ready)
                for unit in range(ring):
                    fetch(i32(unit // 2), unit % 2, places(i32(unit // 2)))
                plgpu.barrier_wait(q_ready)

                def step(i, carry):
                    state, acc, held = carry
                    j, following = walk.tile(i), places(i + ring // 2 + 1)
                    (scores,) = wg.settle([wg.begin_scores(views(q_smem)[0], use(2 * i))])
                    wg.warpgroup_barrier()
                    fetch(i + ring // 2, ring % 2, held)
                    hide = lambda x: wg.visible(x, rows.position - j * s.keys, 1)
                    scores = lax.cond(j >= rows.kv_seen, hide, lambda x: x, scores)
                    first = lax.rem(i, i32(s.steps)) == 0
                    p, state, alpha = softmax.weigh_few(scores, state, scale, first)
                    acc = lax.cond(first, lambda: softmax.nothing(s.head_dim), lambda: wg.rescale(acc, alpha))
                    values = use(2 * i + 1)
                    tiles.clear_past_end(values, rows.length - j * s.keys)
                    acc = wg.settle(wg.begin_weighted(acc, wg.narrow(p), values))
                    wg.warpgroup_barrier()
                    fetch(i + (ring + 1) // 2, 1 - ring % 2, following if ring % 2 else held)

                    @pl.when((lax.rem(i, i32(s.steps)) == s.steps - 1) | (i == count - 1))
                    def _():
                        at = (item, block, walk.partition(i))
                        wg.put_state(acc, state.m, wg.row_sum(state.den), sums.at[at], ends.at[at])

                    return state, acc, following

                # looked up a tile ahead of its use: a lookup takes as long as the scores
                carry = (softmax.start(), softmax.nothing(s.head_dim), places(i32(ring // 2)))
                lax.fori_loop(i32(0), count, step, carry)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*lead, heads, s.head_dim), f32),
            jax.ShapeDtypeStruct((*lead, 2, heads), f32),
        ),
        grid=(grid,),
        grid_names=("program",),
        scratch_types=dict(
            q_smem=panels(s.panels),
            kv_smem=panels(ring, s.panels, rows=s.keys),
            q_ready=plgpu.Barrier(num_arrivals=wg.arrivals(tiles.q_boxes(s))),
            ready=plgpu.Barrier(num_arrivals=tiles.kv_arrivals(s), num_barriers=ring),
        ),
        compiler_params=PARAMS,
    )


def _folded(s: Shape):
    """Fold the partitions of 128 / D heads of one row in ascending order, and finish them."""
    heads, side = _state_heads(s), 128 // s.head_dim
    units = heads // side

    def body(sums, ends, cu_q, lens, work, out, lse, *, sums_smem, ends_smem, ready):
        item, block, unit = (lax.axis_index(name) for name in ("item", "block", "unit"))

        @pl.when(work[item, 0] >= 0)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)
            count = _finished(rows)
            await_previous()  # for the states

            def bring(b) -> None:
                @pl.when(b * BATCH < count)
                def _():
                    slot, some = lax.rem(b, i32(AHEAD)), pl.ds(b * BATCH, BATCH)
                    columns = pl.ds(unit * 128, 128)
                    plgpu.copy_gmem_to_smem(sums.at[item, block, some, columns], sums_smem.at[slot], ready.at[slot])
                    plgpu.copy_gmem_to_smem(ends.at[item, block, some], ends_smem.at[slot], ready.at[slot])

            for b in range(AHEAD):
                bring(i32(b))

            def batch(b, carry):
                slot = lax.rem(b, i32(AHEAD))
                plgpu.barrier_wait(ready.at[slot])

                def one(k, carry):
                    part = plgpu.load(sums_smem.at[slot, k], layout=wg.LINE)
                    end = lambda which, h: ends_smem[slot, k, which * heads + unit * side + h]
                    sums_of, m, den = carry
                    return wg.fold_line(sums_of, m, den, part, [(end(0, h), end(1, h)) for h in range(side)])

                carry = lax.fori_loop(i32(0), lax.min(count - b * BATCH, i32(BATCH)), one, carry)
                plgpu.commit_smem()
                bring(b + AHEAD)
                return carry

            carry = (wg.line(0.0), wg.line(wg.LOWEST), wg.line(0.0))
            total, m, den = lax.fori_loop(i32(0), lax.div(count + (BATCH - 1), i32(BATCH)), batch, carry)
            head = rows.head + unit * side
            wg.put_line(total, m, den, out, lse, rows.start, head, rows.head + rows.heads, s.head_dim)

    def call(sums, ends, *operands):
        flat = (s.items, s.blocks, s.partitions, -1)
        return kernel(sums.reshape(flat), ends.reshape(flat), *operands)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.q_heads * s.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((s.tokens, s.q_heads), f32),
        ),
        grid=(s.items, s.blocks, units),
        grid_names=("item", "block", "unit"),
        scratch_types=dict(
            sums_smem=plgpu.SMEM((AHEAD, BATCH, 128), f32),
            ends_smem=plgpu.SMEM((AHEAD, BATCH, 2 * heads), f32),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=AHEAD),
        ),
        compiler_params=PARAMS,
    )
    return call
