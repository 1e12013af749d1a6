"""Gradients of keys and values: a program keeps 128 keys of one KV head and walks the query tiles that see them, one
query head after another.

Scores are laid out [keys, rows], so that probabilities and their gradients are left operands in registers.
"""

from __future__ import annotations

import functools

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
    f32,
    i32,
    landed,
    multiply_in,
)
from isojax.pallas_kernels.attn.reference_bwd import CHAIN_HEADS
from isojax.pallas_kernels.interpretable import panels as panels_of
from isojax.pallas_kernels.interpretable import views
from isojax.schedule import LOG2E


def key_gradients(s: Shape, scale: float, stages: int):
    """-> dkv [T, Hkv, 2 D] bf16; with several chains, fp32 tiles [items, Hkv, chains, 128, 2 D] for `fold`."""
    panels = s.panels
    whole = s.chains == 1
    wide = 2 * s.head_dim
    out_shape = (s.tokens, s.kv_heads, wide) if whole else (s.items, s.kv_heads, s.chains, TILE, wide)

    def body(q, kv, ct, stats, cu_q, work, dkv, **scratch):
        item, lane, wg = (lax.axis_index(n) for n in ("item", "lane", "wg"))

        @tiles.of_item(s, cu_q, work, item)
        def _(at):
            tile = at.tiles - work[item, 1]
            kv_head, chain = lax.div(lane, i32(s.chains)), lax.rem(lane, i32(s.chains))
            head = kv_head * s.group + chain * CHAIN_HEADS
            heads = lax.min(i32(CHAIN_HEADS), s.group - chain * CHAIN_HEADS)
            begin = tile * (TILE // ROWS)  # the first query tile that sees these keys
            end = lax.div(at.length + (ROWS - 1), i32(ROWS))
            heads = jnp.where(at.padding, 0, heads)
            walk = _Keys(s, scale, stages, at, tile, head, heads, begin, end, **scratch)
            pl.when(wg == CONSUMERS)(lambda: walk.produce(q, kv, ct, kv_head))

            @pl.when(wg < CONSUMERS)
            def _():
                dk, dv = walk.consume(wg, stats)
                if whole:
                    walk.store(wg, dk, dv, kv_head, dkv)
                else:
                    here = dkv.at[item, kv_head, chain, pl.ds(wg * ROWS, ROWS)]
                    for c, part in enumerate((*dk, *dv)):
                        here.at[:, pl.ds(c * PANEL, PANEL)][...] = part

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, bf16 if whole else f32),
        grid=(s.items, s.kv_heads * s.chains),
        grid_names=("item", "lane"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=PARAMS,
        scratch_types=dict(
            k_tile=panels_of(panels, rows=TILE),
            v_tile=panels_of(panels, rows=TILE),
            q_tile=panels_of(stages, panels, rows=ROWS),
            ct_tile=panels_of(stages, panels, rows=ROWS),
            kv_ready=plgpu.Barrier(num_arrivals=2 * panels * CONSUMERS),
            full=plgpu.Barrier(num_arrivals=2 * panels, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            cleared=plgpu.Barrier(num_arrivals=CONSUMERS),
            numbers=tiles.numbers_smem(),
            **tiles.spare_smem(ROWS),
        ),
    )


class _Keys:
    """One program of `key_gradients`."""

    def __init__(self, s, scale, stages, at, tile, head, heads, begin, end, **scratch):
        self.s, self.scale, self.stages, self.at, self.tile = s, scale, stages, at, tile
        self.head, self.heads, self.begin, self.end = head, heads, begin, end
        self.smem = scratch

    def produce(self, q, kv, ct, kv_head) -> None:
        plgpu.set_max_registers(REGISTERS["produce"], action="decrease")
        s, smem, d = self.s, self.smem, self.s.head_dim

        @pl.when(self.heads > 0)
        def _():
            for half, name in enumerate("kv"):
                source = lambda rows, cols, half=half: kv.at[rows, kv_head, pl.ds(half * d + cols.start, PANEL)]
                tiles.fetch(source, self.at.start + self.tile * TILE, views(smem[f"{name}_tile"])[1], smem["kv_ready"])

        per = self.end - self.begin

        @pl.loop(0, self.heads * per)
        def _(n):
            slot, h = lax.rem(n, i32(self.stages)), self.head + lax.div(n, per)
            row = self.at.start + (self.begin + lax.rem(n, per)) * ROWS
            full = smem["full"].at[slot]
            plgpu.barrier_wait(smem["free"].at[slot])
            tiles.fetch(lambda rows, cols: q.at[rows, h, cols], row, views(smem["q_tile"])[1].at[slot], full)
            column = h * s.head_dim
            source = lambda rows, cols: ct.at[rows, pl.ds(column + cols.start, PANEL)]
            tiles.fetch(source, row, views(smem["ct_tile"])[1].at[slot], full)

        tiles.drain(smem["free"])

    def consume(self, wg, stats):
        """-> dk, dv of this warpgroup's 64 keys, each as panels [64, 64] fp32."""
        plgpu.set_max_registers(REGISTERS["consume"], action="increase")
        smem, panels = self.smem, self.s.panels
        tiles.number(smem["numbers"].at[wg])
        for i in range(self.stages):
            plgpu.barrier_arrive(smem["free"].at[i])  # all stages begin free
        pl.when(self.heads > 0)(lambda: plgpu.barrier_wait(smem["kv_ready"]))
        per = self.end - self.begin

        def run(*accs):
            dk, dv = accs[:panels], accs[panels:]

            def each(h, _):
                step = lambda i, _: self.step(wg, stats.at[self.head + h], h * per + i - self.begin, i, dk, dv)
                lax.fori_loop(self.begin, self.end, step, None)

            lax.fori_loop(0, self.heads, each, None)
            plgpu.wgmma_wait(0)
            self.release(self.heads * per - 1)
            return [landed(a, 0) for a in accs]

        accs = pl.run_scoped(run, *accumulators(2 * panels))
        return [a * self.scale for a in accs[:panels]], accs[panels:]

    def release(self, n) -> None:
        pl.when(n >= 0)(lambda: plgpu.barrier_arrive(self.smem["free"].at[lax.rem(n, i32(self.stages))]))

    def step(self, wg, stats, n, i, dk, dv) -> None:
        """Add query tile i; n: its place in the ring."""
        smem, panels = self.smem, self.s.panels
        mine = tiles.own_rows(wg)
        slot = lax.rem(n, i32(self.stages))
        k, v = (views(smem[f"{name}_tile"])[0].at[:, mine] for name in "kv")
        q, ct = (views(smem[f"{name}_tile"])[0].at[slot] for name in ("q", "ct"))
        plgpu.barrier_wait(smem["full"].at[slot])
        rest = self.at.length - i * ROWS  # rows of the tile that are the request's
        self.clear(wg, slot, rest)

        # Not by TMA, which starts at multiples of 16 bytes only (an "illegal instruction" elsewhere), as a request's
        # rows need not. A thread holds 16 rows' statistics: each is loaded while the product that it goes with is under
        # way. Those of rows that are not the request's are zero, as their q and ct are: then they add nothing.
        def stat(kind):
            row = self.at.start + i * ROWS
            odd = row & 1
            value = plgpu.load(stats.at[kind, odd, pl.ds(row + odd, ROWS)], layout=WGMMA.reduce(0), optimized=False)

            def cut(x):
                row = plgpu.load(smem["numbers"].at[wg, 1, pl.ds(0, ROWS)], layout=WGMMA.reduce(0))
                return plgpu.layout_cast(jnp.where(row < rest, x, jnp.zeros_like(x)), WGMMA.reduce(0))

            return lax.cond(rest < ROWS, cut, lambda x: plgpu.layout_cast(x, WGMMA.reduce(0)), value)

        lse = stat(0)

        def probabilities(raw):
            self.release(n - 1)  # dk of the step before is done as well
            p = jnp.exp2(raw * (self.scale * LOG2E) - tiles.spread(lse, raw, 1))
            return tiles.causal(p, (i - self.begin - wg) * ROWS, smem["numbers"].at[wg], keys=0)

        def scores(acc):
            for c in range(panels):
                plgpu.wgmma(acc, k.at[c], q.at[c].T)

        def slopes(acc):
            for c in range(panels):
                plgpu.wgmma(acc, v.at[c], ct.at[c].T)

        def values(p):
            for c in range(panels):
                multiply_in(dv[c], p.astype(bf16), ct.at[c], tiles.spare_of(smem, wg))

        def first(acc):
            scores(acc)
            return landed(acc, 0)

        def second(acc):
            values(p)
            slopes(acc)
            return landed(acc, 0)

        p = probabilities(pl.run_scoped(first, *accumulators(1, ROWS)))
        delta = stat(1)
        dp = pl.run_scoped(second, *accumulators(1, ROWS))
        ds16 = (p * (dp - tiles.spread(delta, dp, 1))).astype(bf16)
        for c in range(panels):
            multiply_in(dk[c], ds16, q.at[c], tiles.spare_of(smem, wg))

    def clear(self, wg, slot, rest) -> None:
        """Zero the rows of a partial query tile that are not the request's: then they add nothing."""

        @pl.when(rest < ROWS)
        def _():
            both = [views(self.smem[f"{name}_tile"])[0].at[slot] for name in ("q", "ct")]
            tiles.clear_rows([x.at[c] for x in both for c in range(self.s.panels)], rest, wg, self.smem["cleared"])

    def store(self, wg, dk, dv, kv_head, dkv) -> None:
        """Round and write dk, dv; they leave through the shared memory of this warpgroup's keys and values."""
        s, mine = self.s, pl.ds(wg * ROWS, ROWS)
        row = self.at.start + self.tile * TILE + wg * ROWS
        valid = self.at.length - self.tile * TILE - wg * ROWS
        for name, parts in (("k", dk), ("v", dv)):
            for c, part in enumerate(parts):
                views(self.smem[f"{name}_tile"])[0].at[c, mine][...] = part.astype(bf16)
        plgpu.commit_smem()

        def copy(first, count):
            for half, name in enumerate("kv"):
                for c in range(s.panels):
                    source = views(self.smem[f"{name}_tile"])[1].at[c, pl.ds(wg * ROWS + first, count)]
                    column = pl.ds(half * s.head_dim + c * PANEL, PANEL)
                    plgpu.copy_smem_to_gmem(source, dkv.at[pl.ds(row + first, count), kv_head, column])

        tiles.store_rows(copy, lax.max(valid, i32(0)))


def fold(s: Shape):
    """Tiles of chains [items, Hkv, chains, 128, 2 D] -> dkv [T, Hkv, 2 D]: added in ascending order, rounded once."""

    def body(parts, cu_q, work, dkv, staged):
        item, kv_head, half = (lax.axis_index(n) for n in ("item", "head", "half"))

        @tiles.of_item(s, cu_q, work, item)
        def _(at):
            tile = at.tiles - work[item, 1]
            tile_view, landing = views(staged)

            def chain(i, rows, columns):
                return plgpu.load(parts.at[item, kv_head, i, rows, columns], layout=WGMMA, optimized=False)

            for c in range(2 * s.panels):
                chains = (chain(i, pl.ds(half * ROWS, ROWS), pl.ds(c * PANEL, PANEL)) for i in range(s.chains))
                tile_view.at[c][...] = functools.reduce(jnp.add, chains).astype(bf16)
            plgpu.commit_smem()
            first = tile * TILE + half * ROWS

            def copy(r, count):
                for c in range(2 * s.panels):
                    target = dkv.at[pl.ds(at.start + first + r, count), kv_head, pl.ds(c * PANEL, PANEL)]
                    plgpu.copy_smem_to_gmem(landing.at[c, pl.ds(r, count)], target)

            tiles.store_rows(copy, lax.max(at.length - first, i32(0)))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((s.tokens, s.kv_heads, 2 * s.head_dim), bf16),
        grid=(s.items, s.kv_heads, CONSUMERS),
        grid_names=("item", "head", "half"),
        scratch_types=dict(staged=panels_of(2 * s.panels, rows=ROWS)),
    )
