"""How attn.core's sm90 kernels move rows: which rows a program owns, their q, their keys and values, their results.

One warpgroup's 64 MMA rows hold `heads` query heads of one KV head, each with the same `tile` query rows: MMA row =
head * tile + query row, so that a head's rows are one TMA box on an 8-row boundary of the swizzled tile. The rows of a
decode program (tile 1) are `heads` heads of one query row. An MMA row's bits do not depend on its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn.softmax_sm90 import PANEL, ROW, ROWS, TILE
from isojax.pallas_kernels.interpretable import views
from isojax.schedule import KV_PARTITION, KV_TILE

DECODE_HEADS = 8  # rows that a decode program's q takes: the TMA box on one 8-row boundary
i32 = jnp.int32


@dataclass(frozen=True)
class Shape:
    """Static facts of one call. page is 0 where the keys are the batch's own; positions: most keys of a request."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    tile: int
    page: int
    positions: int
    items: int

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def panels(self) -> int:
        return self.head_dim // PANEL

    @property
    def heads(self) -> int:
        """Query heads in one program."""
        return min(self.group, DECODE_HEADS if self.tile == 1 else ROWS // self.tile)

    @property
    def blocks_per_kv_head(self) -> int:
        return -(-self.group // self.heads)

    @property
    def blocks(self) -> int:
        """Programs per work item."""
        return self.kv_heads * self.blocks_per_kv_head

    @property
    def partitions(self) -> int:
        """Most partitions of a request."""
        return -(-self.positions // KV_PARTITION)


@dataclass(frozen=True)
class Rows:
    """What one program computes; every field a device scalar but the shape."""

    shape: Shape
    request: jax.Array
    start: jax.Array  # first row in q
    valid: jax.Array  # rows of the tile that belong to the request
    position: jax.Array  # of the first row
    length: jax.Array  # keys of the request
    offset: jax.Array  # of the request's first row in q
    kv_head: jax.Array
    head: jax.Array  # first query head

    @property
    def kv_tiles(self) -> jax.Array:
        """Tiles of keys that any of these rows sees."""
        return lax.div(self.position + self.valid + (KV_TILE - 1), i32(KV_TILE))

    def limits(self) -> jax.Array:
        """[64] last key that each MMA row sees."""
        if self.shape.tile == 1:
            return plgpu.layout_cast(jnp.full((ROWS,), self.position, i32), ROW)
        row = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=ROW)
        return self.position + (row & (self.shape.tile - 1))

    @property
    def heads(self) -> jax.Array:
        """Query heads that this program really has; in a KV head's last block they may be fewer than shape.heads."""
        s = self.shape
        return lax.min((self.kv_head + 1) * s.group - self.head, i32(s.heads))


def locate(s: Shape, cu_q, lens, work, item: jax.Array, block: jax.Array) -> Rows:
    """The rows of program (item, block). The work item must be in use."""
    request, first = work[item, 0], work[item, 1]
    offset = cu_q[request]
    count = cu_q[request + 1] - offset
    length = lens[request]
    kv_head = lax.div(block, i32(s.blocks_per_kv_head))
    part = lax.rem(block, i32(s.blocks_per_kv_head))
    return Rows(
        shape=s,
        request=request,
        start=offset + first,
        valid=lax.min(count - first, i32(s.tile)),
        position=length - count + first,
        length=length,
        offset=offset,
        kv_head=kv_head,
        head=kv_head * s.group + part * s.heads,
    )


# -- in ----------------------------------------------------------------------------------------------------------------
def q_arrivals(s: Shape) -> int:
    return s.panels * (1 if s.tile == 1 else s.heads)


def fetch_q(rows: Rows, q, q_smem, barrier) -> None:
    """Start the copies of q into q_smem [panels, 64, 64]; MMA rows without a query row keep what was there.

    q: [T, Hq, D], or [T Hq, D] where tile is 1. A box may reach into the next rows of q, which
    are computed and never stored.
    """
    s = rows.shape
    for c in range(s.panels):
        panel, column = q_smem.at[c], pl.ds(c * PANEL, PANEL)
        if s.tile == 1:
            source = q.at[pl.ds(rows.start * s.q_heads + rows.head, DECODE_HEADS), column]
            plgpu.copy_gmem_to_smem(source, panel.at[pl.ds(0, DECODE_HEADS)], barrier)
            continue
        for i in range(s.heads):
            head = rows.head + lax.min(i32(i), rows.heads - 1)
            source = q.at[pl.ds(rows.start, s.tile), head, column]
            plgpu.copy_gmem_to_smem(source, panel.at[pl.ds(i * s.tile, s.tile)], barrier)


def kv_arrivals(s: Shape) -> int:
    """Copies that make one tile of keys (or of values)."""
    return s.panels * (KV_TILE // min(s.page or KV_TILE, KV_TILE))


def fetch_kv(rows: Rows, kv, table, j: jax.Array, half: int, smem, barrier) -> None:
    """Start the copies of keys (half 0) or values (half 1) of tile j into smem [panels, 64, 64].

    Rows past the request's length are whatever is stored there; pages past it are never looked up.
    """
    s = rows.shape
    columns = [pl.ds(half * s.head_dim + c * PANEL, PANEL) for c in range(s.panels)]
    if not s.page:
        for c, column in enumerate(columns):
            source = kv.at[pl.ds(rows.offset + j * KV_TILE, KV_TILE), rows.kv_head, column]
            plgpu.copy_gmem_to_smem(source, smem.at[c], barrier)
        return
    chunk = min(s.page, KV_TILE)
    last = lax.div(rows.length - 1, i32(chunk)) * chunk
    for i in range(KV_TILE // chunk):
        position = lax.min(j * KV_TILE + i * chunk, last)
        page = table[rows.request, lax.div(position, i32(s.page))]
        inside = pl.ds(lax.rem(position, i32(s.page)), chunk)
        for c, column in enumerate(columns):
            source = kv.at[page, inside, rows.kv_head, column]
            plgpu.copy_gmem_to_smem(source, smem.at[c, pl.ds(i * chunk, chunk)], barrier)


def clear_past_end(v_smem, end: jax.Array) -> None:
    """Zero the rows of v_smem [panels, 64, 64] from `end` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(end < KV_TILE)
    def _():
        row = plgpu.broadcasted_iota(i32, (KV_TILE, PANEL), 0, layout=TILE)
        for c in range(v_smem.shape[0]):
            v = plgpu.load(v_smem.at[c], layout=TILE)
            v_smem[c] = jnp.where(row < end, v, jnp.zeros_like(v))
        plgpu.commit_smem()


# -- out ---------------------------------------------------------------------------------------------------------------
def store(rows: Rows, out_panels, lse_rows: jax.Array, out, lse, smem, lse_smem) -> None:
    """Write out_panels (of [64, D]) and lse_rows [64] to the valid rows of out [T, Hq D] and lse [T, Hq], and wait.

    smem: `panels` to stage through. A partly valid tile goes row by row: the next rows of T belong to other programs.
    """
    s = rows.shape
    tile, staged = views(smem)
    for c, panel in enumerate(out_panels):
        tile[c] = panel
    lse_smem[...] = lse_rows
    plgpu.commit_smem()

    def copy(i, r, count: int):
        for c in range(s.panels):
            source = staged.at[c, pl.ds(i * s.tile + r, count)]
            column = (rows.head + i) * s.head_dim + c * PANEL
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(rows.start + r, count), pl.ds(column, PANEL)])

    @pl.loop(0, rows.heads)
    def _(i):
        @pl.when(rows.valid == s.tile)
        def _():
            copy(i, 0, s.tile)

        @pl.when(rows.valid < s.tile)
        def _():
            pl.loop(0, rows.valid)(lambda r: copy(i, r, 1))

        @pl.loop(0, rows.valid)
        def _(r):
            lse[rows.start + r, rows.head + i] = lse_smem[i * s.tile + r]

    plgpu.wait_smem_to_gmem(0)
