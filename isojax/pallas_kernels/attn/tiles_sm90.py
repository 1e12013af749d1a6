"""How attn.core's sm90 kernels move rows: which rows a program owns, their q, their keys and values, their results.

One warpgroup's 64 MMA rows hold `heads` query heads of one KV head, each with the same `tile` query rows: MMA row =
head * tile + query row, so that a head's rows are one TMA box on an 8-row boundary of the swizzled tile. The rows of a
decode program (tile 1) are `heads` heads of one query row. An MMA row's bits do not depend on its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.attn.softmax_sm90 import ROW, ROWS, TILE
from isojax.schedule import KV_PARTITION, KV_TILE

DECODE_HEADS = 8  # rows that a decode program's q takes: the TMA box on one 8-row boundary
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


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
        row = plgpu.broadcasted_iota(i32, (ROWS,), 0, layout=ROW)
        return self.position + (row & (self.shape.tile - 1))

    def heads_here(self):
        """(index in the program, query head, whether it exists or None where it always does)."""
        s = self.shape
        end = (self.kv_head + 1) * s.group
        for i in range(s.heads):
            head = self.head + i
            yield (i, head, None) if s.group % s.heads == 0 else (i, lax.min(head, end - 1), head < end)


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


# -- in -----------------------------------------------------------------------------------------------------------------
def q_arrivals(s: Shape) -> int:
    return 1 if s.tile == 1 else s.heads


def fetch_q(rows: Rows, q, q_smem, barrier) -> None:
    """Start the copies of q [T, Hq, D] into q_smem [64, D]. MMA rows without a query row keep what was there.

    A box may reach into the next rows of q: those are computed and never stored.
    """
    s = rows.shape
    if s.tile == 1:
        flat = q.reshape(s.tokens * s.q_heads, s.head_dim)
        source = flat.at[pl.ds(rows.start * s.q_heads + rows.head, DECODE_HEADS)]
        plgpu.copy_gmem_to_smem(source, q_smem.at[pl.ds(0, DECODE_HEADS)], barrier)
        return
    for i, head, _ in rows.heads_here():
        source = q.at[pl.ds(rows.start, s.tile), head]
        plgpu.copy_gmem_to_smem(source, q_smem.at[pl.ds(i * s.tile, s.tile)], barrier)


def kv_chunks(s: Shape) -> int:
    """Copies that make one tile of keys (or of values)."""
    return KV_TILE // min(s.page or KV_TILE, KV_TILE)


def fetch_kv(rows: Rows, kv, table, j: jax.Array, half: int, smem, barrier) -> None:
    """Start the copies of keys (half 0) or values (half 1) of tile j into smem [64, D].

    Rows past the request's length are whatever is stored there; pages past it are never looked up.
    """
    s = rows.shape
    column = pl.ds(half * s.head_dim, s.head_dim)
    if not s.page:
        at = rows.offset + j * KV_TILE
        plgpu.copy_gmem_to_smem(kv.at[pl.ds(at, KV_TILE), rows.kv_head, column], smem, barrier)
        return
    chunk = min(s.page, KV_TILE)
    last = lax.div(rows.length - 1, i32(chunk)) * chunk
    for i in range(kv_chunks(s)):
        position = lax.min(j * KV_TILE + i * chunk, last)
        page = table[rows.request, lax.div(position, i32(s.page))]
        inside = pl.ds(lax.rem(position, i32(s.page)), chunk) if s.page > chunk else pl.ds(0, chunk)
        source = kv.at[page, inside, rows.kv_head, column]
        plgpu.copy_gmem_to_smem(source, smem.at[pl.ds(i * chunk, chunk)], barrier)


def clear_past_end(v_smem, end: jax.Array) -> None:
    """Zero the rows of v_smem [64, D] from `end` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(end < KV_TILE)
    def _():
        v = plgpu.load(v_smem, layout=TILE)
        row = plgpu.broadcasted_iota(i32, v.shape, 0, layout=TILE)
        v_smem[...] = jnp.where(row < end, v, jnp.zeros_like(v))
        plgpu.commit_smem()


# -- out ----------------------------------------------------------------------------------------------------------------
def store(rows: Rows, out_tile: jax.Array, lse_rows: jax.Array, out, lse, out_smem, lse_smem) -> None:
    """Write out_tile [64, D] and lse_rows [64] to the valid rows of out [T, Hq D] and lse [T, Hq]; waits for it."""
    s = rows.shape
    out_smem[...] = out_tile
    lse_smem[...] = lse_rows
    plgpu.commit_smem()

    def columns(head):
        return pl.ds(head * s.head_dim, s.head_dim)

    for i, head, exists in rows.heads_here():

        @pl.when((rows.valid == s.tile) if exists is None else (rows.valid == s.tile) & exists)
        def _(i=i, head=head):
            source = out_smem.at[pl.ds(i * s.tile, s.tile)]
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(rows.start, s.tile), columns(head)])

        @pl.when((rows.valid < s.tile) if exists is None else (rows.valid < s.tile) & exists)
        def _(i=i, head=head):
            @pl.loop(0, rows.valid)
            def _(r):
                plgpu.copy_smem_to_gmem(out_smem.at[i * s.tile + r], out.at[rows.start + r, columns(head)])

        @pl.loop(0, rows.valid if exists is None else jnp.where(exists, rows.valid, 0))
        def _(r, i=i, head=head):
            lse[rows.start + r, head] = lse_smem[i * s.tile + r]

    plgpu.wait_smem_to_gmem(0)


def tile_smem(*lead: int, head_dim: int) -> Any:
    """SMEM [*lead, 64, D] bf16 that wgmma reads."""
    return plgpu.SMEM((*lead, ROWS, head_dim), bf16, transforms=SWIZZLED)
