"""attn.core on Hopper for many query rows: two warpgroups share keys and values that a third one brings.

Each of the two owns 64 MMA rows. While one tile's weights meet the values on the tensor cores, the next tile's scores
are already there and go through the softmax; the two warpgroups take turns in handing products to the tensor cores.
At the end of a partition its sum joins that of all partitions, which waits in shared memory but for its first columns:
it is needed once in a partition, and two sums would not fit the registers.

A block stays on its multiprocessor and computes one program after another: the next program's q, keys and values are
on their way while this one's results leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.pallas_kernels import warpgroup as wg
from isojax.pallas_kernels.attn import softmax_sm90 as softmax
from isojax.pallas_kernels.attn import tiles_sm90 as tiles
from isojax.pallas_kernels.attn.tiles_sm90 import WARPGROUPS, Places, Rows, Shape
from isojax.pallas_kernels.chip import SMS
from isojax.pallas_kernels.interpretable import BLOCKS_OF_1, BLOCKS_OF_8, overlaid, panels, views

i32 = jnp.int32
REGISTERS = 3 * 168  # of a thread of each warpgroup, together, as launched. One more, and the kernel waits forever


@dataclass(frozen=True)
class Tuning:
    """What changes speed and never bits."""

    stages: int = 2  # tiles of keys and of values in flight
    turns: bool = True  # the warpgroups take turns
    grid: int = SMS  # thread blocks that share the programs
    width: int = 0  # an item's programs side by side; 0: what `width_of` takes
    held: int = 0  # columns of the sum of all partitions that stay in registers; 0: what `held_of` takes

    def __post_init__(self) -> None:
        if self.held < 0 or self.held % 8:
            raise ValueError(f"held={self.held}: give columns in eights, or 0 for the default")


def prefill(q, kv, table, cu_q, lens, work, *, scale: float, shape: Shape, tuning: Tuning = Tuning()):
    """-> out [T, Hq D], lse [T, Hq]."""
    operands = (q, kv, cu_q, lens, work) if table is None else (q, kv, cu_q, lens, work, table)
    return _kernel(shape, scale, tuning)(*operands)


def _kernel(s: Shape, scale: float, tuning: Tuning):
    stages = tuning.stages
    few, many = registers(s)
    grid = min(tuning.grid, s.items * s.blocks)
    rings = lambda: [panels(stages, s.panels, rows=s.keys) for _ in range(2)]
    landed = plgpu.Barrier(num_arrivals=tiles.kv_arrivals(s), num_barriers=stages)
    released = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)

    def body(q, kv, cu_q, lens, work, *rest, q_smem, kv_smem, sums, ends, q_ready, q_free, ready, free, turn, cleared):
        *table, out, lse = rest
        block, w = lax.axis_index("block"), lax.axis_index("warpgroup")
        own, *results = sums
        results = (results[0], results[0]) if interpreting() else results
        of = lambda item, program: tiles.locate(s, cu_q, lens, work, item, program)

        @pl.when(w == WARPGROUPS)
        def _():
            plgpu.set_max_registers(few, action="decrease")
            producer = Producer(q, kv, table[0] if table else None, q_smem, kv_smem, q_ready, q_free, ready, free)
            producer.drain(_each(s, work, block, grid, tuning, lambda *at: producer.run(of(*at[:2]), at[2])))

        @pl.when(w < WARPGROUPS)
        def _():
            plgpu.set_max_registers(many, action="increase")

            def run(item, program, before):
                rows = of(item, program)
                mine = views(q_smem)[0].at[w], kv_smem, own.at[w], ends.at[w]
                consumer = Consumer(
                    rows, rows.warpgroup(w), w, before, scale, tuning, *mine, ready, free, q_free.at[w], turn, cleared
                )
                plgpu.barrier_wait(q_ready.at[w])
                acc, lse_rows = consumer.run()
                wg.warpgroup_barrier()  # every thread has its sum out of where the results are staged
                mine = of(item, program).warpgroup(w)  # again: not kept in registers
                tiles.store(mine, acc, lse_rows, out, lse, [x.at[w] for x in results])
                return rows.kv_tiles

            _each(s, work, block, grid, tuning, run)
            plgpu.wait_smem_to_gmem(0)

    staging = (WARPGROUPS, 2 * s.panels, 64, 64)  # the bytes of a warpgroup's sums; half of them are used
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((s.tokens, s.q_heads * s.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((s.tokens, s.q_heads), jnp.float32),
        ),
        grid=(grid,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            q_smem=panels(WARPGROUPS, s.panels),
            kv_smem=rings(),
            sums=overlaid(
                plgpu.SMEM((WARPGROUPS, s.panels * 64 * 64), jnp.float32),
                plgpu.SMEM(staging, jnp.bfloat16, transforms=BLOCKS_OF_8),
                plgpu.SMEM(staging, jnp.bfloat16, transforms=BLOCKS_OF_1),
            ),
            ends=plgpu.SMEM((WARPGROUPS, 128), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=wg.arrivals(tiles.q_boxes(s)), num_barriers=WARPGROUPS),
            q_free=plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            ready=[landed, landed],
            free=[released, released],
            turn=plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS),
            cleared=plgpu.Barrier(num_arrivals=WARPGROUPS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )


def registers(s: Shape) -> tuple[int, int]:
    """Of a thread of the producer, which needs them for the addresses of a tile's chunks, and of the consumers."""
    few = 40 if s.keys // s.chunk <= tiles.TOGETHER else 56
    return few, (REGISTERS - few) // WARPGROUPS


def held_of(s: Shape) -> int:
    """Columns of the sum of all partitions that the consumers' registers hold without spilling anything else."""
    _, many = registers(s)
    return 48 if many >= 232 else 24


def _each(s: Shape, work, block, grid: int, tuning: Tuning, run: Callable[..., jax.Array]) -> jax.Array:
    """run(item, program of it, tiles so far) -> its tiles, for this block's programs -> tiles of all."""
    items = wg.count_used(work)
    width = i32(tuning.width or width_of(items, s.blocks, grid))
    rounds = lax.div(items * width + (grid - 1), i32(grid))

    def one(k, before):
        item, program = dealt(k, block, rounds, width, s.blocks, grid)
        return lax.cond(item < items, lambda: before + run(item, program, before), lambda: before)

    return lax.fori_loop(i32(0), rounds * lax.div(i32(s.blocks), width), one, i32(0))


def width_of(items, blocks: int, grid: int):
    """How many of an item's programs go side by side: a divisor of `blocks`, the least that fills the grid about twice.

    The fewer, the fewer keys and values are in use at a time, and they fit the L2; but they must keep all blocks busy.
    """
    width = i32(blocks)
    for some in (n for n in range(blocks - 1, 0, -1) if blocks % n == 0):
        width = jnp.where(items * some >= 2 * grid - grid // 8, some, width)
    return width


def dealt(k, block, rounds, width, blocks: int, grid: int):
    """(item, program of it) that is the k-th of thread block `block`; an item that is not there stands for none.

    `width` programs of every item, the longest first, then the next ones. Such a set is dealt out to and fro in
    `rounds` rounds, so that all blocks get about as many tiles; what is left uneven differs in sign and in place from
    set to set.
    """
    chosen, r = lax.div(k, rounds), lax.rem(k, rounds)
    sets = lax.div(i32(blocks), width)
    turned = lax.div(lax.div(chosen, i32(2)) * grid, lax.div(sets + 1, i32(2)))
    place = lax.rem(block + turned, i32(grid))
    place = jnp.where(lax.rem(r + chosen, i32(2)) == 1, grid - 1 - place, place)
    index = r * grid + place
    return lax.div(index, width), chosen * width + lax.rem(index, width)


@dataclass(frozen=True)
class Producer:
    """Brings what the consumers need, in the order in which its places become free."""

    q: Any
    kv: Any
    table: Any
    q_smem: Any
    kv_smem: Any
    q_ready: Any
    q_free: Any
    ready: Any
    free: Any

    @property
    def stages(self) -> int:
        return views(self.kv_smem[0])[0].shape[0]

    def run(self, rows: Rows, before: jax.Array) -> jax.Array:
        """One program's q, keys and values; keys of tile j + 1, then values of tile j. -> tiles."""
        count = rows.kv_tiles
        places = lambda j: tiles.places(rows, self.table, j)

        def bring(half: int, j, at: Places) -> None:
            slot = lax.rem(before + j, i32(self.stages))
            pl.when(before + j >= self.stages)(lambda: plgpu.barrier_wait(self.free[half].at[slot]))
            tiles.fetch_kv(rows, self.kv, at, half, views(self.kv_smem[half])[1].at[slot], self.ready[half].at[slot])

        first = places(i32(0))
        bring(0, i32(0), first)
        for w in range(WARPGROUPS):
            pl.when(before > 0)(lambda w=w: plgpu.barrier_wait(self.q_free.at[w]))
            tiles.fetch_q(rows.warpgroup(i32(w)), self.q, views(self.q_smem)[1].at[w], self.q_ready.at[w])

        def step(j, carry):
            at, following = carry
            later = places(j + 2)  # a tile ahead of its use: a lookup takes as long as the copies
            pl.when(j + 1 < count)(lambda: bring(0, j + 1, following))
            bring(1, j, at)
            return following, later

        lax.fori_loop(i32(0), count, step, (first, places(i32(1))))
        return count

    def drain(self, tiles_: jax.Array) -> None:
        """Wait until the last tiles and the last q are used: no barrier may go with an arrival that nobody saw."""
        for half in self.free:
            for k in range(self.stages):
                pl.when(tiles_ > k)(lambda k=k, half=half: plgpu.barrier_wait(half.at[k]))
        for w in range(WARPGROUPS):
            pl.when(tiles_ > 0)(lambda w=w: plgpu.barrier_wait(self.q_free.at[w]))


@dataclass(frozen=True)
class Consumer:
    """One warpgroup's walk over the tiles of keys of one program."""

    program: Rows
    rows: Rows
    w: jax.Array
    before: jax.Array  # tiles of the programs before it
    scale: float
    tuning: Tuning
    q: Any
    smem: Any
    sums: Any
    ends: Any
    ready: Any
    free: Any
    q_free: Any
    turn: Any
    cleared: Any

    def _slot(self, j):
        return lax.rem(self.before + j, i32(self.tuning.stages))

    def _tile(self, half: int, j):
        return views(self.smem[half])[0].at[self._slot(j)]

    def _await(self, half: int, j):
        plgpu.barrier_wait(self.ready[half].at[self._slot(j)])
        return self._tile(half, j)

    def _release(self, half: int, j) -> None:
        plgpu.barrier_arrive(self.free[half].at[self._slot(j)])

    def _release_keys(self, j) -> None:
        """Of tile j; after the last one, q as well."""
        self._release(0, j)
        pl.when(j == self.program.kv_tiles - 1)(lambda: plgpu.barrier_arrive(self.q_free))

    def _first(self, j):
        """Whether tile j is its partition's first."""
        return lax.rem(j, i32(self.rows.shape.steps)) == 0

    def _seen(self, scores, j):
        hide = lambda s: wg.visible(s, self.rows.position - j * self.rows.shape.keys, self.rows.tile)
        return lax.cond(j >= self.program.kv_seen, hide, lambda s: s, scores)

    def _close(self, j, part: softmax.Running):
        """Where tile j opens a partition: the factors of the sum of all before it, and of the last one's.

        part: the state before tile j, which is not the request's first: `ends` holds the sum of all. This is done while
        tile j's scores are on their way, a tile before `_rebase` needs it: there the tensor cores would wait.
        """

        def close():
            total, old, new = softmax.close(self._total(), part)
            wg.keep_rows(self.ends, total.m, total.den)
            return old, new

        return lax.cond(self._first(j), close, lambda: (wg.full_row(0.0), wg.full_row(0.0)))

    def _rebase(self, j, acc, alpha, held, factors):
        """What tile j's values are added to: the sum at the new maximum, or nothing in a new partition; and `held`.

        factors: `_close` of tile j. Where it opens a partition, the last one's sum joins that of all.
        """

        def fold():
            old, new = factors
            (first,) = wg.fold(self.sums, held, old, acc, new, keep=True)
            return softmax.nothing(self.rows.shape.head_dim), first

        return lax.cond(self._first(j) & (j > 0), fold, lambda: (wg.rescale(acc, alpha), held))

    def _total(self) -> softmax.Total:
        return softmax.Total(*wg.kept_rows(self.ends))

    def run(self):
        """-> panels of out, log-sum-exp [64]."""
        s, count = self.rows.shape, self.program.kv_tiles
        several = count > s.steps
        zero, last = i32(0), count - 1
        if self.tuning.turns:
            pl.when((self.w == 1) & (count > 1))(lambda: wg.pass_turn(self.turn, i32(0)))
        scores = wg.begin_scores(self.q, self._await(0, zero))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the results of the program before: they lie where sums will

        @pl.when(several)
        def _():
            wg.put(self.sums, softmax.nothing(s.head_dim))
            none = softmax.begin()
            wg.keep_rows(self.ends, none.m, none.den)

        (scores,) = wg.settle([scores])
        self._release_keys(zero)
        start = softmax.start()
        p, state, alpha = softmax.weigh(self._seen(scores, zero), start, self.scale, zero == 0)
        columns = min(self.tuning.held or held_of(s), s.head_dim)
        held, factors = wg.zeros(columns), (wg.full_row(0.0), wg.full_row(0.0))
        carry = (wg.narrow(p), softmax.nothing(s.head_dim), state, held, factors, alpha)
        p, acc, state, held, factors, alpha = lax.fori_loop(i32(1), count, self._step, carry)
        acc, held = self._rebase(last, acc, alpha, held, factors)
        values = self._await(1, last)
        self._clear(values, last)
        acc = wg.settle(wg.begin_weighted(acc, p, values))
        self._release(1, last)
        total = lax.cond(several, self._total, softmax.begin)
        total, old, new = softmax.close(total, state)
        end = lambda sums: lambda: wg.fold(sums, held, old, acc, new, keep=False)
        return wg.finish(lax.cond(several, end(self.sums), end(None)), total.m, total.den)

    def _step(self, j, carry):
        """Tile j's scores and weights, beside the values of tile j - 1.

        The weights come in two halves. Before the second one the values are there, so that rounding the first one's
        runs beside the exponentials of the second.
        """
        p, acc, before, held, factors, alpha = carry
        self._await(0, j)  # before the turn: who waits for keys keeps nobody from the tensor cores
        self._take_turn()
        scores = wg.begin_scores(self.q, self._tile(0, j))
        acc, held = self._rebase(j - 1, acc, alpha, held, factors)
        acc = wg.begin_weighted(acc, p, self._await(1, j - 1))
        self._pass_turn(j)
        factors = self._close(j, before)
        (scores,) = wg.settle([scores], pending=1)
        self._release_keys(j)
        x, m, alpha = softmax.weigh_first(self._seen(scores, j), before, self.scale, self._first(j))
        x, m, alpha = wg.pin([x, m, alpha])
        self._keep_apart(j)
        *acc, x = wg.settle([*acc, x])
        self._release(1, j - 1)
        p, state = softmax.weigh_second(x, m, before, alpha, self.scale)
        return wg.narrow(p), tuple(acc), state, held, factors, alpha

    def _keep_apart(self, j) -> None:
        """A branch that is never taken, between the first half of a tile's weights and the wait for the values before.

        Without one there ptxas moves that wait up to where it costs most (seen in the SASS), as nothing in the code
        ties the two.
        """
        pl.when(j + self.rows.start < 0)(wg.warpgroup_barrier)

    def _take_turn(self) -> None:
        if self.tuning.turns:
            wg.take_turn(self.turn, self.w)

    def _pass_turn(self, j) -> None:
        if self.tuning.turns:
            wanted = (self.w == 0) | (j + 1 < self.program.kv_tiles)
            pl.when(wanted)(lambda: wg.pass_turn(self.turn, 1 - self.w))

    def _clear(self, values, j) -> None:
        """Where the request ends within tile j, one of the two warpgroups clears what lies behind; both read the tile.

        Both wait for both: a warpgroup that were two programs ahead would leave the other one waiting forever.
        """
        end = self.rows.length - j * self.rows.shape.keys

        @pl.when(end < self.rows.shape.keys)
        def _():
            pl.when(self.w == 0)(lambda: tiles.clear_past_end(values, end))
            plgpu.barrier_arrive(self.cleared)
            plgpu.barrier_wait(self.cleared)
