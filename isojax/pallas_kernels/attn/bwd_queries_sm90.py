"""Gradients of queries: a program keeps 128 query rows of one head and walks the tiles of keys that they see.

Scores are laid out [rows, keys], so that the gradients of probabilities are a left operand in registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn import bwd_tiles_sm90 as tiles
from isojax.pallas_kernels.attn.bwd_tiles_sm90 import (
    CONSUMERS,
    PANEL,
    PARAMS,
    REGISTERS,
    ROWS,
    TILE,
    WGMMA,
    Shape,
    accumulators,
    bf16,
    i32,
    landed,
    multiply_in,
)
from isojax.pallas_kernels.interpretable import panels as panels_of
from isojax.pallas_kernels.interpretable import views
from isojax.schedule import LOG2E


def query_gradients(s: Shape, scale: float, keys: int, stages: int):
    """-> dq [T, Hq, D]."""
    panels = s.panels

    def body(q, kv, ct, stats, cu_q, work, dq, **scratch):
        item, head, wg = (lax.axis_index(n) for n in ("item", "head", "wg"))

        @tiles.of_item(s, cu_q, work, item)
        def _(at):
            tile = work[item, 1] - 1
            # key tiles up to the last row's own key
            end = lax.div(lax.min((tile + 1) * TILE, at.length) + (keys - 1), i32(keys))
            end = jnp.where(at.padding, 0, end)
            walk = _Queries(s, scale, stages, keys, at, tile, head, end, **scratch)
            pl.when(wg == CONSUMERS)(lambda: walk.produce(q, kv, ct))
            pl.when(wg < CONSUMERS)(lambda: walk.store(wg, walk.consume(wg, stats), dq))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.tokens, s.q_heads, s.head_dim), bf16),
        grid=(s.items, s.q_heads),
        grid_names=("item", "head"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=PARAMS,
        scratch_types=dict(
            q_tile=panels_of(panels, rows=TILE),
            ct_tile=panels_of(panels, rows=TILE),
            k_tile=panels_of(stages, panels, rows=keys),
            v_tile=panels_of(stages, panels, rows=keys),
            q_ready=plgpu.Barrier(num_arrivals=2 * panels * CONSUMERS),
            full=plgpu.Barrier(num_arrivals=2 * panels * (keys // ROWS), num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            cleared=plgpu.Barrier(num_arrivals=CONSUMERS),
            numbers=tiles.numbers_smem(),
            **tiles.spare_smem(keys),
        ),
    )


class _Queries:
    """One program of `query_gradients`."""

    def __init__(self, s, scale, stages, keys, at, tile, head, end, **scratch):
        self.s, self.scale, self.stages, self.keys = s, scale, stages, keys
        self.at, self.tile, self.head, self.end = at, tile, head, end
        self.smem = scratch

    def produce(self, q, kv, ct) -> None:
        plgpu.set_max_registers(REGISTERS["produce"], action="decrease")
        s, smem, h, d = self.s, self.smem, self.head, self.s.head_dim
        kv_head = lax.div(h, i32(s.group))

        @pl.when(self.end > 0)
        def _():
            row, ready = self.at.start + self.tile * TILE, smem["q_ready"]
            tiles.fetch(lambda rows, cols: q.at[rows, h, cols], row, views(smem["q_tile"])[1], ready)
            source = lambda rows, cols: ct.at[rows, pl.ds(h * d + cols.start, PANEL)]
            tiles.fetch(source, row, views(smem["ct_tile"])[1], ready)

        @pl.loop(0, self.end)
        def _(j):
            slot = lax.rem(j, i32(self.stages))
            plgpu.barrier_wait(smem["free"].at[slot])
            for half, name in enumerate("kv"):
                source = lambda rows, cols, half=half: kv.at[rows, kv_head, pl.ds(half * d + cols.start, PANEL)]
                row = self.at.start + j * self.keys
                tiles.fetch(source, row, views(smem[f"{name}_tile"])[1].at[slot], smem["full"].at[slot])

        tiles.drain(smem["free"])

    def consume(self, wg, stats):
        """-> dq of this warpgroup's 64 rows, as panels [64, 64] fp32."""
        plgpu.set_max_registers(REGISTERS["consume"], action="increase")
        smem = self.smem
        tiles.number(smem["numbers"].at[wg])
        for i in range(self.stages):
            plgpu.barrier_arrive(smem["free"].at[i])
        rows = pl.ds(self.at.start + self.tile * TILE + wg * ROWS, ROWS)  # the last ones may lie past the request's end
        lse, delta = (
            plgpu.load(stats.at[self.head, kind, 0, rows], layout=WGMMA.reduce(1), optimized=False) for kind in range(2)
        )
        pl.when(self.end > 0)(lambda: plgpu.barrier_wait(smem["q_ready"]))

        def run(*dq):
            lax.fori_loop(0, self.end, lambda j, _: self.step(wg, j, dq, lse, delta), None)
            return [landed(a, 0) for a in dq]

        return [a * self.scale for a in pl.run_scoped(run, *accumulators(self.s.panels))]

    def step(self, wg, j, dq, lse, delta) -> None:
        smem, panels = self.smem, self.s.panels
        slot, mine = lax.rem(j, i32(self.stages)), tiles.own_rows(wg)
        q, ct = (views(smem[f"{name}_tile"])[0].at[:, mine] for name in ("q", "ct"))
        k, v = (views(smem[f"{name}_tile"])[0].at[slot] for name in "kv")
        plgpu.barrier_wait(smem["full"].at[slot])
        self.clear(wg, slot, self.at.length - j * self.keys)

        def products(s_acc, dp_acc):
            for c in range(panels):
                plgpu.wgmma(s_acc, q.at[c], k.at[c].T)
            for c in range(panels):
                plgpu.wgmma(dp_acc, ct.at[c], v.at[c].T)
            raw = landed(s_acc, panels)
            p = jnp.exp2(raw * (self.scale * LOG2E) - tiles.spread(lse, raw, 0))
            ds = p * (landed(dp_acc, 0) - tiles.spread(delta, raw, 0))
            most = self.tile * TILE + wg * ROWS - j * self.keys
            ds = tiles.causal(ds, most, smem["numbers"].at[wg], keys=1)
            ds16 = ds.astype(bf16)
            for c in range(panels):
                multiply_in(dq[c], ds16, k.at[c], tiles.spare_of(smem, wg))

        pl.run_scoped(products, *accumulators(2, self.keys))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(smem["free"].at[slot])

    def clear(self, wg, slot, rest) -> None:
        """Zero the keys of a partial tile that are not the request's."""

        @pl.when(rest < self.keys)
        def _():
            panels = [views(self.smem["k_tile"])[0].at[slot, c] for c in range(self.s.panels)]
            tiles.clear_rows(panels, rest, wg, self.smem["cleared"])

    def store(self, wg, dq, out) -> None:
        """Round and write dq through the shared memory of this warpgroup's queries."""
        mine = pl.ds(wg * ROWS, ROWS)
        row = self.at.start + self.tile * TILE + wg * ROWS
        valid = self.at.length - self.tile * TILE - wg * ROWS
        for c, part in enumerate(dq):
            views(self.smem["q_tile"])[0].at[c, mine][...] = part.astype(bf16)
        plgpu.commit_smem()

        def copy(first, count):
            for c in range(self.s.panels):
                source = views(self.smem["q_tile"])[1].at[c, pl.ds(wg * ROWS + first, count)]
                plgpu.copy_smem_to_gmem(source, out.at[pl.ds(row + first, count), self.head, pl.ds(c * PANEL, PANEL)])

        tiles.store_rows(copy, lax.max(valid, i32(0)))
