"""attn.core on Hopper for many query rows: two warpgroups share keys and values that a third one brings.

Each of the two owns 64 MMA rows. While one tile's weights meet the values on the tensor cores, the next tile's scores
are already there and go through the softmax; the two warpgroups take turns in handing products to the tensor cores.
At the end of a partition its sum goes to shared memory, where the sum of all partitions waits: it is needed once in
a partition, and two sums would not fit the registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels import warpgroup as wg
from isojax.pallas_kernels.attn import softmax_sm90 as softmax
from isojax.pallas_kernels.attn import tiles_sm90 as tiles
from isojax.pallas_kernels.attn.tiles_sm90 import WARPGROUPS, Rows, Shape
from isojax.pallas_kernels.interpretable import panels, views

i32 = jnp.int32
# Registers a thread of the producer, and of the consumers. A launch gives each of 384 threads 168; what one warpgroup
# takes, the others must have given: 3 x 168 in all. One more, and the kernel waits forever.
FEW, MANY = 40, 232


@dataclass(frozen=True)
class Tuning:
    """What changes speed and never bits."""

    stages: int = 2  # tiles of keys and of values in flight
    overlap: bool = True  # scores of a tile in flight beside the values of the one before
    turns: bool = True  # the warpgroups take turns


def prefill(q, kv, table, cu_q, lens, work, *, scale: float, shape: Shape, tuning: Tuning = Tuning()):
    """-> out [T, Hq D], lse [T, Hq]."""
    operands = (q, kv, cu_q, lens, work) if table is None else (q, kv, cu_q, lens, work, table)
    return _kernel(shape, scale, tuning)(*operands)


def _kernel(s: Shape, scale: float, tuning: Tuning):
    stages = tuning.stages
    rings = lambda: [panels(stages, s.panels, rows=s.keys) for _ in range(2)]
    landed = plgpu.Barrier(num_arrivals=tiles.kv_arrivals(s), num_barriers=stages)
    released = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)

    def body(q, kv, cu_q, lens, work, *rest, q_smem, kv_smem, sums, ends, q_ready, ready, free, turn, cleared):
        *table, out, lse = rest
        item, block, w = (lax.axis_index(name) for name in ("item", "block", "warpgroup"))

        @pl.when(work[item, 0] >= 0)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)

            @pl.when(w == WARPGROUPS)
            def _():
                plgpu.set_max_registers(FEW, action="decrease")
                _produce(rows, kv, table[0] if table else None, kv_smem, ready, free, stages)

            @pl.when(w < WARPGROUPS)
            def _():
                plgpu.set_max_registers(MANY, action="increase")
                mine = rows.warpgroup(w)
                landing = views(q_smem)[1].at[w]
                tiles.fetch_q(mine, q, landing, q_ready.at[w])
                own = views(q_smem)[0].at[w], kv_smem, sums.at[w], ends.at[w]
                consumer = Consumer(rows, mine, w, scale, tuning, *own, ready, free, turn, cleared)
                plgpu.barrier_wait(q_ready.at[w])
                acc, lse_rows = consumer.run()
                mine = tiles.locate(s, cu_q, lens, work, item, block).warpgroup(w)  # again: not kept in registers
                tiles.store(mine, acc, lse_rows, out, lse, [v.at[w] for v in views(q_smem)])

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.q_heads * s.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((s.tokens, s.q_heads), jnp.float32),
        ),
        grid=(s.blocks, s.items),  # programs of one KV head run side by side, the longest first
        grid_names=("block", "item"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            q_smem=panels(WARPGROUPS, s.panels),
            kv_smem=rings(),
            sums=plgpu.SMEM((WARPGROUPS, s.panels * 64 * 64), jnp.float32),
            ends=plgpu.SMEM((WARPGROUPS, 2, 64), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=wg.arrivals(tiles.q_boxes(s)), num_barriers=WARPGROUPS),
            ready=[landed, landed],
            free=[released, released],
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            cleared=plgpu.Barrier(num_arrivals=1),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def _produce(rows: Rows, kv, table, smem, ready, free, stages: int) -> None:
    """Bring the keys of tile j + 1, then the values of tile j: the order in which their places become free."""
    count = rows.kv_tiles

    def bring(half: int, j) -> None:
        slot, at = lax.rem(j, i32(stages)), tiles.places(rows, table, j)
        pl.when(j >= stages)(lambda: plgpu.barrier_wait(free[half].at[slot]))
        tiles.fetch_kv(rows, kv, at, half, views(smem[half])[1].at[slot], ready[half].at[slot])

    bring(0, i32(0))

    @pl.loop(i32(0), count)
    def _(j):
        pl.when(j + 1 < count)(lambda: bring(0, j + 1))
        bring(1, j)


@dataclass(frozen=True)
class Consumer:
    """One warpgroup's walk over the tiles of keys."""

    program: Rows
    rows: Rows
    w: jax.Array
    scale: float
    tuning: Tuning
    q: Any
    smem: Any
    sums: Any
    ends: Any
    ready: Any
    free: Any
    turn: Any
    cleared: Any

    def _slot(self, j):
        return lax.rem(j, i32(self.tuning.stages))

    def _tile(self, half: int, j):
        return views(self.smem[half])[0].at[self._slot(j)]

    def _await(self, half: int, j):
        plgpu.barrier_wait(self.ready[half].at[self._slot(j)])
        return self._tile(half, j)

    def _expect_keys(self, j) -> None:
        """Wait for tile j's keys, if there is such a tile.

        Placed between a tile's weights and the wait for the values before it: without a branch there, ptxas moves that
        wait up to where it costs most (seen in the SASS), as nothing in the code ties the two together.
        """
        pl.when(j < self.program.kv_tiles)(lambda: plgpu.barrier_wait(self.ready[0].at[self._slot(j)]))

    def _release(self, half: int, j) -> None:
        """Tile j's place may be filled again, if there is still something to fill it with."""
        wanted = j + self.tuning.stages < self.program.kv_tiles
        pl.when(wanted)(lambda: plgpu.barrier_arrive(self.free[half].at[self._slot(j)]))

    def _first(self, j):
        """Whether tile j is its partition's first."""
        return lax.rem(j, i32(self.rows.shape.steps)) == 0

    def _weigh(self, scores, before: softmax.Running, j):
        """-> weights, state, and the factor of what was summed before."""
        hide = lambda s: wg.visible(s, self.rows.position - j * self.rows.shape.keys, self.rows.tile)
        scores = lax.cond(j >= self.program.kv_seen, hide, lambda s: s, scores)
        return softmax.weigh(scores, before, self.scale, self._first(j))

    def _total(self) -> softmax.Total:
        return softmax.Total(*(plgpu.load(self.ends.at[k], layout=wg.ROW) for k in range(2)))

    def _rebase(self, j, acc, alpha, before: softmax.Running):
        """What tile j's values are added to: the partition's sum at its new maximum, or nothing in a new partition."""

        def anew():
            total, old, new = softmax.close(self._total(), before)
            self.ends[0], self.ends[1] = total.m, total.den
            wg.fold(self.sums, old, acc, new, keep=True)
            return softmax.nothing(self.rows.shape.head_dim)

        return lax.cond(self._first(j), anew, lambda: wg.rescale(acc, alpha))

    def run(self):
        """-> panels of out, log-sum-exp [64]."""
        s, count = self.rows.shape, self.program.kv_tiles
        several = count > s.steps

        @pl.when(several)
        def _():
            wg.put(self.sums, softmax.nothing(s.head_dim))
            none = softmax.begin()
            self.ends[0], self.ends[1] = none.m, none.den

        if self.tuning.turns:
            pl.when((self.w == 1) & (count > 1))(lambda: wg.pass_turn(self.turn, i32(0)))
        step = self._overlapped if self.tuning.overlap else self._plain
        zero, last = i32(0), count - 1
        (scores,) = wg.settle([wg.begin_scores(self.q, self._await(0, zero))])
        self._release(0, zero)
        p, state = self._weigh(scores, softmax.start(), zero)[:2]
        self._expect_keys(i32(1))
        carry = (wg.narrow(p), softmax.nothing(s.head_dim), state)
        p, acc, state = lax.fori_loop(i32(1), count, step, carry)
        values = self._await(1, last)
        self._clear(values, last)
        acc = wg.settle(wg.begin_weighted(acc, p, values))
        total = lax.cond(several, self._total, softmax.begin)
        total, old, new = softmax.close(total, state)
        end = lambda sums: lambda: wg.fold(sums, old, acc, new, keep=False)
        return wg.finish(lax.cond(several, end(self.sums), end(None)), total.m, total.den)

    def _take_turn(self) -> None:
        if self.tuning.turns:
            wg.take_turn(self.turn, self.w)

    def _pass_turn(self, j) -> None:
        if self.tuning.turns:
            wanted = (self.w == 0) | (j + 1 < self.program.kv_tiles)
            pl.when(wanted)(lambda: wg.pass_turn(self.turn, 1 - self.w))

    def _overlapped(self, j, carry):
        """Tile j's scores and weights, beside the values of tile j - 1."""
        p, acc, before = carry
        self._take_turn()
        scores = wg.begin_scores(self.q, self._tile(0, j))
        values = self._await(1, j - 1)
        acc = wg.begin_weighted(acc, p, values)
        self._pass_turn(j)
        (scores,) = wg.settle([scores], pending=1)
        self._release(0, j)
        p, state, alpha = self._weigh(scores, before, j)
        (p,) = wg.pin([p])
        self._expect_keys(j + 1)
        *acc, p = wg.settle([*acc, p])
        self._release(1, j - 1)
        return wg.narrow(p), self._rebase(j, tuple(acc), alpha, before), state

    def _plain(self, j, carry):
        """As _overlapped, one product after the other."""
        p, acc, before = carry
        values = self._await(1, j - 1)
        self._take_turn()
        acc = wg.begin_weighted(acc, p, values)
        scores = wg.begin_scores(self.q, self._tile(0, j))
        self._pass_turn(j)
        *acc, scores = wg.settle([*acc, scores])
        self._release(1, j - 1)
        self._release(0, j)
        p, state, alpha = self._weigh(scores, before, j)
        self._expect_keys(j + 1)
        return wg.narrow(p), self._rebase(j, tuple(acc), alpha, before), state

    def _clear(self, values, j) -> None:
        """One of the two warpgroups clears what lies behind the request's end; both read the tile."""
        pl.when(self.w == 0)(lambda: tiles.clear_past_end(values, self.rows.length - j * self.rows.shape.keys))
        pl.when(self.w == 0)(lambda: plgpu.barrier_arrive(self.cleared))
        plgpu.barrier_wait(self.cleared)
