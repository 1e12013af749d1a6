"""attn.core on Hopper. One warpgroup computes 64 MMA rows against one KV head.

Two ways, the same bits (softmax_sm90 holds the arithmetic of both):
- `whole`: a program walks all partitions of its rows and folds them as it goes.
- `split`: for few rows with long contexts. Programs of one row share out the partitions and write each one's state;
  a second kernel folds them in ascending order.
Which one runs follows from shapes alone: `split` where tile is 1, a request may span several partitions, and the
programs would not fill the GPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.attn import tiles_sm90 as tiles
from isojax.pallas_kernels.attn.reference import core_supports
from isojax.pallas_kernels.attn.softmax_sm90 import PANEL, ROW, ROWS, TILE, State, finish, fold, fresh, spread, weigh
from isojax.pallas_kernels.attn.tiles_sm90 import Rows, Shape
from isojax.pallas_kernels.interpretable import accumulate, panels, views
from isojax.schedule import KV_PARTITION, KV_TILE

STAGES = 2  # tiles of keys and of values in flight
FULL_GPU = 4 * 132  # programs that keep an H200 busy; decode splits requests until there are about so many
TILES = (1, 8, 16, 32, 64)
STEPS = KV_PARTITION // KV_TILE
i32, f32 = jnp.int32, jnp.float32
PARAMS = plgpu.CompilerParams(approx_math=True)  # exp2 and log2 are one instruction each


def supports(q, kv, table, cu_q, lens, work, *, scale, tile):
    core_supports(q, kv, table, cu_q, lens, work, scale=scale, tile=tile)
    t, heads, d = q.shape
    refuse = functools.partial(Unsupported, "attn.core")
    if q.dtype != jnp.bfloat16 or kv.dtype != jnp.bfloat16:
        raise refuse(f"q {q.dtype}, kv {kv.dtype}", "bfloat16 on sm90", "cast the model, or use arch cpu")
    if d not in (64, 128):
        raise refuse(f"head size {d}", "64, 128", "use arch cpu")
    if tile not in TILES:
        raise refuse(f"tile {tile}", str(TILES), "take it from attn.work.tile_rows('sm90', group)")
    if table is not None and kv.shape[1] % 8:
        raise refuse(f"pages of {kv.shape[1]} tokens", "16, 32, 64, 128, ...", "change block_size")
    least = max(tile, KV_TILE if table is None else 1, -(-tiles.DECODE_HEADS // heads) if tile == 1 else 1)
    if t < least:
        raise refuse(f"{t} query rows", f"at least {least} here", "pad the batch")


def core(q, kv, table, cu_q, lens, work, *, scale, tile):
    s = shape_of(q, kv, table, work, tile)
    return attend(q, kv, table, cu_q, lens, work, scale=scale, shape=s, splits=splits_of(s))


def shape_of(q, kv, table, work, tile: int) -> Shape:
    t, heads, d = q.shape
    page = 0 if table is None else kv.shape[1]
    return Shape(t, heads, kv.shape[-2], d, tile, page, t if table is None else table.shape[1] * page, work.shape[0])


def splits_of(s: Shape) -> int:
    """Programs that share one row's partitions; 1 where a program walks them all."""
    if s.tile != 1:
        return 1
    return max(1, min(s.partitions, -(-FULL_GPU // (s.items * s.blocks))))


def attend(q, kv, table, cu_q, lens, work, *, scale: float, shape: Shape, splits: int):
    """-> out [T, Hq D], lse [T, Hq]; `splits` > 1 takes the split way, whose bits are the same."""
    out_type = (
        jax.ShapeDtypeStruct((shape.tokens, shape.q_heads * shape.head_dim), q.dtype),
        jax.ShapeDtypeStruct((shape.tokens, shape.q_heads), f32),
    )
    if shape.tile == 1:
        q = q.reshape(shape.tokens * shape.q_heads, shape.head_dim)
    operands = (q, kv, cu_q, lens, work) if table is None else (q, kv, cu_q, lens, work, table)
    if splits == 1:
        return _whole(shape, scale, out_type)(*operands)
    states = _partials(shape, scale, splits)(*operands)
    return _folded(shape, out_type)(*states, cu_q, lens, work)


# -- one partition -----------------------------------------------------------------------------------------------------
class Walk:
    """Walks the KV tiles [begin, end) of one program's rows, STAGES copies ahead."""

    def __init__(self, rows: Rows, scale: float, kv, table, smem, barriers, end: jax.Array):
        self.rows, self.scale, self.kv, self.table, self.end = rows, scale, kv, table, end
        self.smem, self.barriers = smem, barriers  # (keys, values), each STAGES deep

    def fetch(self, half: int, j) -> None:
        @pl.when(j < self.end)
        def _():
            slot = lax.rem(j, i32(STAGES))
            into, barrier = views(self.smem[half])[1].at[slot], self.barriers[half].at[slot]
            tiles.fetch_kv(self.rows, self.kv, self.table, j, half, into, barrier)

    def start(self, begin) -> None:
        for i in range(STAGES):
            self.fetch(0, begin + i)
            self.fetch(1, begin + i)

    def step(self, q_tile, limits, j, state: State) -> State:
        m, den, acc = state
        slot = lax.rem(j, i32(STAGES))
        k_tile, v_tile = (views(smem)[0].at[slot] for smem in self.smem)
        k_ready, v_ready = self.barriers
        plgpu.barrier_wait(k_ready.at[slot])

        def qk(ref):
            for c in range(len(acc)):
                plgpu.wgmma(ref, q_tile.at[c], k_tile.at[c].T)
            return ref[...]

        tile = plgpu.ACC((ROWS, KV_TILE), f32)  # pyright: ignore[reportPrivateImportUsage]
        scores = pl.run_scoped(qk, tile)
        self.fetch(0, j + STAGES)
        m, den, alpha, p = weigh(scores, m, den, limits - j * KV_TILE, scale=self.scale)
        wide = spread(alpha)
        acc = tuple(a * wide for a in acc)
        plgpu.barrier_wait(v_ready.at[slot])
        tiles.clear_past_end(v_tile, self.rows.length - j * KV_TILE)
        p = p.astype(jnp.bfloat16)
        acc = tuple(accumulate(a, p, views(self.smem[1])[0], (slot, c)) for c, a in enumerate(acc))
        self.fetch(1, j + STAGES)
        return m, den, acc

    def partition(self, q_tile, limits, p) -> State:
        """The state of partition p alone."""
        first, last = p * STEPS, lax.min((p + 1) * STEPS, self.rows.kv_tiles)
        step = functools.partial(self.step, q_tile, limits)
        return lax.fori_loop(first, last, step, fresh(self.rows.shape.head_dim))


def _scratch(s: Shape) -> dict:
    ready = plgpu.Barrier(num_arrivals=tiles.kv_arrivals(s), num_barriers=STAGES)
    return dict(
        q_smem=panels(s.panels),
        k_smem=panels(STAGES, s.panels),
        v_smem=panels(STAGES, s.panels),
        q_ready=plgpu.Barrier(num_arrivals=tiles.q_arrivals(s)),
        k_ready=ready,
        v_ready=ready,
    )


def _acc_smem(s: Shape, *lead: int):
    return plgpu.SMEM((*lead, s.panels, ROWS, PANEL), f32)


def _put(acc_smem, acc) -> None:
    for c, a in enumerate(acc):
        acc_smem[c] = a


def _get(acc_smem):
    return tuple(plgpu.load(acc_smem.at[c], layout=TILE) for c in range(acc_smem.shape[0]))


def _whole(s: Shape, scale: float, out_type):
    def body(q, kv, cu_q, lens, work, *rest, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, acc_smem, lse_smem):
        *table, out, lse = rest
        item, block = lax.axis_index("item"), lax.axis_index("block")

        @pl.when(work[item, 0] >= 0)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)
            walk = Walk(
                rows, scale, kv, table[0] if table else None, (k_smem, v_smem), (k_ready, v_ready), rows.kv_tiles
            )
            tiles.fetch_q(rows, q, views(q_smem)[1], q_ready)
            walk.start(i32(0))
            plgpu.barrier_wait(q_ready)
            limits = rows.limits()
            count = lax.div(rows.kv_tiles + (STEPS - 1), i32(STEPS))
            # The folded acc waits in SMEM: it is needed once in 16 tiles, and two would not fit the registers.
            m, den, acc = fresh(s.head_dim)
            _put(acc_smem, acc)

            def each(p, folded):
                part = walk.partition(views(q_smem)[0], limits, p)
                m, den, acc = fold((*folded, _get(acc_smem)), part)
                _put(acc_smem, acc)
                return m, den

            m, den = lax.fori_loop(0, count, each, (m, den))
            tiles.store(rows, *finish((m, den, _get(acc_smem))), out, lse, q_smem, lse_smem)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(s.items, s.blocks),
        grid_names=("item", "block"),
        scratch_types=_scratch(s) | dict(acc_smem=_acc_smem(s), lse_smem=plgpu.SMEM((ROWS,), f32)),
        compiler_params=PARAMS,
    )


# -- partitions side by side -------------------------------------------------------------------------------------------
def _partials(s: Shape, scale: float, splits: int):
    """-> fp32 states, acc [panels, 8, 64] and (m, den) [2, 64] per (item, block, partition); none past a request."""
    heads = tiles.DECODE_HEADS
    lead = (s.items, s.blocks, s.partitions)

    def body(q, kv, cu_q, lens, work, *rest, q_smem, k_smem, v_smem, q_ready, k_ready, v_ready, acc_smem, row_smem):
        *table, acc_states, row_states = rest
        item, block, split = (lax.axis_index(name) for name in ("item", "block", "split"))

        @pl.when(work[item, 0] >= 0)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)
            count = lax.div(rows.kv_tiles + (STEPS - 1), i32(STEPS))

            @pl.when(split < count)
            def _():
                tiles.fetch_q(rows, q, views(q_smem)[1], q_ready)
                plgpu.barrier_wait(q_ready)
                limits = rows.limits()

                @pl.loop(0, lax.div(count - split + (splits - 1), i32(splits)))
                def _(n):
                    p = split + n * splits
                    end = lax.min((p + 1) * STEPS, rows.kv_tiles)
                    walk = Walk(rows, scale, kv, table[0] if table else None, (k_smem, v_smem), (k_ready, v_ready), end)
                    walk.start(p * STEPS)
                    m, den, acc = walk.partition(views(q_smem)[0], limits, p)
                    _put(acc_smem, acc)
                    row_smem[0] = m
                    row_smem[1] = den
                    plgpu.commit_smem()
                    for c in range(s.panels):
                        plgpu.copy_smem_to_gmem(acc_smem.at[c, pl.ds(0, heads)], acc_states.at[item, block, p, c])
                    plgpu.copy_smem_to_gmem(row_smem, row_states.at[item, block, p])
                    plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*lead, s.panels, heads, PANEL), f32),
            jax.ShapeDtypeStruct((*lead, 2, ROWS), f32),
        ),
        grid=(s.items, s.blocks, splits),
        grid_names=("item", "block", "split"),
        scratch_types=_scratch(s) | dict(acc_smem=_acc_smem(s), row_smem=plgpu.SMEM((2, ROWS), f32)),
        compiler_params=PARAMS,
    )


def _folded(s: Shape, out_type):
    """Fold the partitions of every (item, block) in ascending order and finish its rows."""
    heads = tiles.DECODE_HEADS

    def body(acc_states, row_states, cu_q, lens, work, out, lse, acc_smem, row_smem, ready, out_smem, lse_smem):
        item, block = lax.axis_index("item"), lax.axis_index("block")

        @pl.when(work[item, 0] >= 0)
        def _():
            rows = tiles.locate(s, cu_q, lens, work, item, block)
            count = lax.div(rows.kv_tiles + (STEPS - 1), i32(STEPS))

            def fetch(p):
                @pl.when(p < count)
                def _():
                    slot = lax.rem(p, i32(STAGES))
                    for c in range(s.panels):
                        into = acc_smem.at[slot, c, pl.ds(0, heads)]
                        plgpu.copy_gmem_to_smem(acc_states.at[item, block, p, c], into, ready.at[slot])
                    plgpu.copy_gmem_to_smem(row_states.at[item, block, p], row_smem.at[slot], ready.at[slot])

            for i in range(STAGES):
                fetch(i32(i))

            def each(p, total):
                slot = lax.rem(p, i32(STAGES))
                plgpu.barrier_wait(ready.at[slot])
                m = plgpu.load(row_smem.at[slot, 0], layout=ROW)
                den = plgpu.load(row_smem.at[slot, 1], layout=ROW)
                acc = _get(acc_smem.at[slot])
                plgpu.commit_smem()
                fetch(p + STAGES)
                return fold(total, (m, den, acc))

            total = lax.fori_loop(0, count, each, fresh(s.head_dim))
            tiles.store(rows, *finish(total), out, lse, out_smem, lse_smem)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(s.items, s.blocks),
        grid_names=("item", "block"),
        scratch_types=dict(
            acc_smem=_acc_smem(s, STAGES),
            row_smem=plgpu.SMEM((STAGES, 2, ROWS), f32),
            ready=plgpu.Barrier(num_arrivals=s.panels + 1, num_barriers=STAGES),
            out_smem=panels(s.panels),
            lse_smem=plgpu.SMEM((ROWS,), f32),
        ),
        compiler_params=PARAMS,
    )
