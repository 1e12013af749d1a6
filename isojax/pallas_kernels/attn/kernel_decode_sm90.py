"""attn.core on Hopper for one query row a request: streaming keys and values as fast as memory gives them.

A program of one warpgroup takes some partitions of one row and KV head and writes the state of each; a second kernel
folds them in ascending order. How many programs share a row follows from the rows that are really there, which the
programs count: an engine's batch of one sequence is padded to 64 rows. It changes no bits.

While one tile's values are weighed on the tensor cores, the next tile's scores become weights. Each warp brings its
part of a tile: the copies of a tile of small pages are many, and one thread that starts them all keeps the others
waiting.
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

    places: int = 0  # tiles of keys or of values in flight or in use, an odd number; 0: what `places_of` takes
    programs: int = 8 * SMS  # rows are split until there are about so many

    def __post_init__(self) -> None:
        """Raises ValueError for places in which keys and values cannot take turns."""
        if self.places and (self.places < 3 or self.places % 2 == 0):
            raise ValueError(f"{self}: give an odd number of places, 3 or more")


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


def places_of(grid: int) -> int:
    """3, so that two programs fit a multiprocessor; 5, all that one of D 128 can hold, where programs are that few."""
    return 5 if grid <= SMS else 3


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


@dataclass(frozen=True)
class Ring:
    """Places for tiles of keys and values, in the order of their use: the keys of tile 0, then by turns the keys of a
    tile and the values of the one before it."""

    smem: Any
    ready: Any

    @property
    def size(self) -> int:
        return views(self.smem)[0].shape[0]

    @property
    def ahead(self) -> int:
        """Tiles whose keys, after those in use, have places."""
        return self.size // 2

    def _slot(self, i, half: int):
        """Of tile i's keys (half 0) or values."""
        use = 2 * i + 2 if half else lax.max(2 * i - 1, i32(0))
        return lax.rem(use, i32(self.size))

    def landing(self, i, half: int):
        slot = self._slot(i, half)
        return views(self.smem)[1].at[slot], self.ready.at[slot]

    def arrived(self, i, half: int):
        slot = self._slot(i, half)
        plgpu.barrier_wait(self.ready.at[slot])
        return views(self.smem)[0].at[slot]


def _partials(s: Shape, scale: float, tuning: Tuning):
    """-> fp32 states per (item, block, partition): sums [heads D], and ends [2 heads]: m, then den."""
    heads = _state_heads(s)
    lead = (s.items, s.blocks, s.partitions)
    grid = grid_of(s, tuning.programs)
    places = tuning.places or places_of(grid)

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
                tile, landing = views(q_smem)
                tiles.fetch_q(rows, q, landing, q_ready)

                def put(acc, state, i):
                    at = (item, block, walk.partition(i))
                    wg.put_state(acc, state.m, wg.row_sum(state.den), sums.at[at], ends.at[at])

                _stream(walk, kv, table, tile, q_ready, Ring(kv_smem, ready), scale, put)

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
            kv_smem=panels(places, s.panels, rows=s.keys),
            q_ready=plgpu.Barrier(num_arrivals=wg.arrivals(tiles.q_boxes(s))),
            ready=plgpu.Barrier(num_arrivals=tiles.kv_arrivals(s, tiles.issuers(s)), num_barriers=places),
        ),
        compiler_params=PARAMS,
    )


def _stream(walk: Walk, kv, table, q, q_ready, ring: Ring, scale: float, put: Callable[..., None]) -> None:
    """Run a program's tiles: while the tensor cores weigh one tile's values, the next one's scores become weights.

    q: SMEM tile, whose copy is under way. put(acc, state, i): store the partition that ends with tile i.
    """
    rows, count = walk.rows, walk.tiles
    s, warps, ahead = rows.shape, tiles.issuers(rows.shape), ring.ahead
    places = lambda i: tiles.places(rows, table, walk.tile(i), warps)
    opens = lambda i: lax.rem(i, i32(s.steps)) == 0

    def fetch(i, half: int, at) -> None:
        """Bring tile i's keys (half 0) or values from `at`."""
        pl.when(i < count)(lambda: tiles.fetch_kv(rows, kv, at, half, *ring.landing(i, half), warps))

    def seen(scores, i):
        j = walk.tile(i)
        hide = lambda x: wg.visible(x, rows.position - j * s.keys, 1)
        return lax.cond(j >= rows.kv_seen, hide, lambda x: x, scores)

    def rebase(i, acc, alpha, past):
        """What tile i's values are added to. past: the state before tile i, which may close a partition."""

        def close():
            put(acc, past, i - 1)
            return softmax.nothing(s.head_dim)

        return wg.rescale(lax.cond(opens(i) & (i > 0), close, lambda: acc), alpha)

    zero, last = i32(0), count - 1
    at = [places(i32(i)) for i in range(ahead + 1)]
    fetch(zero, 0, at[0])
    for i in range(ahead):
        fetch(i32(i + 1), 0, at[i + 1])
        fetch(i32(i), 1, at[i])
    known = at[ahead], places(i32(ahead + 1)), places(i32(ahead + 2))
    plgpu.barrier_wait(q_ready)
    (scores,) = wg.settle([wg.begin_scores(q, ring.arrived(zero, 0))])
    wg.warpgroup_barrier()
    fetch(i32(ahead + 1), 0, known[1])
    start = softmax.start()
    p, state, alpha = softmax.weigh_few(seen(scores, zero), start, scale, zero == 0)

    def step(i, carry):
        """Tile i's scores and weights, beside the values of tile i - 1. known: places of tile i + ahead - 1 and on."""
        p, acc, before, past, alpha, known = carry
        scores = wg.begin_scores(q, ring.arrived(i, 0))
        acc = rebase(i - 1, acc, alpha, past)
        acc = wg.begin_weighted(acc, p, ring.arrived(i - 1, 1))
        later = places(i + ahead + 2)  # a tile ahead of its use: a lookup takes as long as the scores
        (scores,) = wg.settle([scores], pending=1)
        wg.warpgroup_barrier()
        fetch(i + ahead - 1, 1, known[0])
        x, state, alpha = softmax.weigh_few(seen(scores, i), before, scale, opens(i))
        x, m, den, alpha = wg.pin([x, *state, alpha])
        pl.when(i + rows.start < 0)(wg.warpgroup_barrier)  # never: it keeps ptxas from waiting for the values up there
        *acc, x = wg.settle([*acc, x])
        wg.warpgroup_barrier()
        fetch(i + ahead + 1, 0, known[2])
        return wg.narrow(x), tuple(acc), softmax.Running(m, den), before, alpha, (*known[1:], later)

    carry = (wg.narrow(p), softmax.nothing(s.head_dim), state, start, alpha, known)
    p, acc, state, past, alpha, _ = lax.fori_loop(i32(1), count, step, carry)
    acc = rebase(last, acc, alpha, past)
    values = ring.arrived(last, 1)
    tiles.clear_past_end(values, rows.length - walk.tile(last) * s.keys)
    acc = wg.settle(wg.begin_weighted(acc, p, values))
    put(acc, state, last)


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
