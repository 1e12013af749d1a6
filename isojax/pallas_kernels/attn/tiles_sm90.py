"""How attn.core's sm90 kernels move rows: which rows a program owns, their q, their keys and values, their results.

One warpgroup's 64 MMA rows hold query heads of one KV head, each with the same query rows: MMA row = head * tile +
query row, so that a head's rows are one TMA box on an 8-row boundary of the swizzled tile. A program of the many-row
kernel has two such warpgroups, MMA rows 0 to 63 and 64 to 127. The rows of a decode program (tile 1) are `heads` heads
of one query row. An MMA row's bits do not depend on its place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.pallas_kernels import warpgroup as wg
from isojax.pallas_kernels.interpretable import views
from isojax.schedule import KV_PARTITION, KV_TILE

ROWS = 64  # of one warpgroup's MMA
PANEL = 64  # columns of a head held together (isojax.pallas_kernels.interpretable.panels)
WARPGROUPS = 2  # that share a many-row program's keys and values
DECODE_HEADS = 8  # rows that a decode program's q takes: the TMA box on one 8-row boundary
CHUNK = 64  # most keys in one TMA box
i32 = jnp.int32


@dataclass(frozen=True)
class Packed:
    """Static facts of a packed batch."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def panels(self) -> int:
        return self.head_dim // PANEL


@dataclass(frozen=True)
class Shape(Packed):
    """Static facts of one call. page is 0 where the keys are the batch's own; positions: most keys of a request."""

    tile: int
    page: int
    positions: int
    items: int
    keys: int = KV_TILE
    partition: int = KV_PARTITION

    @property
    def heads(self) -> int:
        """Query heads in one program."""
        return min(self.group, DECODE_HEADS if self.tile == 1 else WARPGROUPS * ROWS // self.tile)

    @property
    def blocks_per_kv_head(self) -> int:
        return -(-self.group // self.heads)

    @property
    def blocks(self) -> int:
        """Programs per work item."""
        return self.kv_heads * self.blocks_per_kv_head

    @property
    def steps(self) -> int:
        """Tiles of keys in a partition."""
        return self.partition // self.keys

    @property
    def partitions(self) -> int:
        """Most partitions of a request."""
        return -(-self.positions // self.partition)

    @property
    def chunk(self) -> int:
        """Keys in one TMA box: a page, or a part of one."""
        return min(self.page or CHUNK, CHUNK, self.keys)


@dataclass(frozen=True)
class Rows:
    """What one program (or one warpgroup of it) computes; every field a device scalar but the first two."""

    shape: Shape
    tile: int  # query rows of one head in these MMA rows
    request: jax.Array
    start: jax.Array  # first row in q
    valid: jax.Array  # rows of the tile that belong to the request
    position: jax.Array  # of the first row
    length: jax.Array  # keys of the request
    offset: jax.Array  # of the request's first row in q
    kv_head: jax.Array
    head: jax.Array  # first query head
    heads: jax.Array  # query heads that are really there

    @property
    def kv_tiles(self) -> jax.Array:
        """Tiles of keys that any of these rows sees."""
        keys = self.shape.keys
        return lax.div(self.position + self.valid + (keys - 1), i32(keys))

    @property
    def kv_seen(self) -> jax.Array:
        """Tiles of keys that every one of these rows sees to the end."""
        return lax.div(self.position + 1, i32(self.shape.keys))

    def warpgroup(self, w: jax.Array) -> Rows:
        """Those of MMA rows 64 w to 64 w + 63. There may be no valid row, or no head."""
        if self.tile > ROWS:
            first = w * ROWS
            valid = lax.min(lax.max(self.valid - first, i32(0)), i32(ROWS))
            return replace(self, tile=ROWS, start=self.start + first, valid=valid, position=self.position + first)
        per = ROWS // self.tile
        heads = lax.min(lax.max(self.heads - w * per, i32(0)), i32(per))
        return replace(self, head=self.head + w * per, heads=heads)


def locate(s: Shape, cu_q, lens, work, item: jax.Array, block: jax.Array) -> Rows:
    """The rows of program (item, block). The work item must be in use."""
    request, first = work[item, 0], work[item, 1]
    offset = cu_q[request]
    count = cu_q[request + 1] - offset
    length = lens[request]
    kv_head = lax.div(block, i32(s.blocks_per_kv_head))
    head = kv_head * s.group + lax.rem(block, i32(s.blocks_per_kv_head)) * s.heads
    return Rows(
        shape=s,
        tile=s.tile,
        request=request,
        start=offset + first,
        valid=lax.min(count - first, i32(s.tile)),
        position=length - count + first,
        length=length,
        offset=offset,
        kv_head=kv_head,
        head=head,
        heads=lax.min((kv_head + 1) * s.group - head, i32(s.heads)),
    )


# -- in ----------------------------------------------------------------------------------------------------------------
def q_boxes(s: Shape) -> int:
    return s.panels * (1 if s.tile == 1 else min(s.heads, ROWS // min(s.tile, ROWS)))


def fetch_q(rows: Rows, q, q_smem, barrier) -> None:
    """Start the copies of q into q_smem [panels, 64, 64]; MMA rows without a query row keep what was there.

    q: [T, Hq, D], or [T Hq, D] where tile is 1. A box may reach into the next rows of q, and where a head is missing
    it holds another one; those are computed and never stored.
    """
    s, boxes = rows.shape, []
    for c in range(s.panels):
        panel, column = q_smem.at[c], (c * PANEL, PANEL)
        if s.tile == 1:
            first = rows.start * s.q_heads + rows.head
            boxes.append((q, ((first, DECODE_HEADS), column), panel.at[pl.ds(0, DECODE_HEADS)]))
            continue
        for i in range(q_boxes(s) // s.panels):
            head = lax.min(rows.head + i, i32(s.q_heads - 1))
            boxes.append((q, ((rows.start, rows.tile), head, column), panel.at[pl.ds(i * rows.tile, rows.tile)]))
    wg.fetch(barrier, boxes)


TOGETHER = 4  # chunks that one thread brings at a time: each takes registers for its addresses


def issuers(s: Shape) -> int:
    """Warps that can bring a tile together, each its own chunks: copies are issued one after another in a thread."""
    return 1 if interpreting() else min(4, s.keys // s.chunk)


def kv_arrivals(s: Shape, warps: int = 0) -> int:
    """Arrivals that make one tile of keys (or of values), brought by one thread or by `warps` warps."""
    chunks = s.keys // s.chunk
    if warps:
        return wg.arrivals(s.panels * chunks)
    return sum(wg.arrivals(s.panels * min(TOGETHER, chunks - i)) for i in range(0, chunks, TOGETHER))


Places = tuple[tuple[jax.Array, jax.Array], ...]  # (page, row within it) of each chunk of a tile; page 0 of no pages


def places(rows: Rows, table, j: jax.Array, warps: int = 0) -> Places:
    """Where the keys of tile j are stored: all of them, or what this warp brings where `warps` do it together.

    Chunks past the request's end repeat its last one.
    """
    s = rows.shape
    last = lax.div(rows.length - 1, i32(s.chunk)) * s.chunk
    out = []
    for i in range(s.keys // s.chunk // max(1, warps)):
        position = lax.min(j * s.keys + _first_key(s, warps) + i * s.chunk, last)
        if s.page:
            row = lax.rem(position, i32(s.page)) if s.page > s.chunk else i32(0)
            out.append((table[rows.request, lax.div(position, i32(s.page))], row))
        else:
            out.append((i32(0), rows.offset + position))
    return tuple(out)


def _first_key(s: Shape, warps: int):
    """The first key of a tile that this warp brings."""
    return wg.warp() * (s.keys // warps) if warps else 0


def fetch_kv(rows: Rows, kv, at: Places, half: int, smem, barrier, warps: int = 0) -> None:
    """Start the copies of keys (half 0) or values (half 1) at `at` into smem [panels, keys, 64].

    Rows past the request's length are whatever is stored there. warps: as `places` had it.
    """
    s, before = rows.shape, _first_key(rows.shape, warps)
    together = len(at) if warps else TOGETHER
    for first in range(0, len(at), together):
        boxes = []
        for i, (page, row) in list(enumerate(at))[first : first + together]:
            for c in range(s.panels):
                inside = ((row, s.chunk), rows.kv_head, (half * s.head_dim + c * PANEL, PANEL))
                into = smem.at[c, pl.ds(before + i * s.chunk, s.chunk)]
                boxes.append((kv, (page, *inside) if s.page else inside, into))
        wg.fetch(barrier, boxes, warps)


def clear_past_end(v_smem, end: jax.Array) -> None:
    """Zero the rows of v_smem [panels, keys, 64] from `end` on: what lies there may be NaN, and 0 * NaN is NaN."""
    panels, keys, _ = v_smem.shape

    @pl.when(end < keys)
    def _():
        row = plgpu.broadcasted_iota(i32, (ROWS, PANEL), 0, layout=plgpu.Layout.WGMMA)
        for c in range(panels):
            for i in range(0, keys, ROWS):
                block = v_smem.at[c, pl.ds(i, ROWS)]
                v = plgpu.load(block, layout=plgpu.Layout.WGMMA)
                block[...] = jnp.where(row < end - i, v, jnp.zeros_like(v))
        plgpu.commit_smem()


# -- out ---------------------------------------------------------------------------------------------------------------
def store(rows: Rows, out_panels, lse_rows: jax.Array, out, lse, smem) -> None:
    """Write out_panels (of [64, D]) and lse_rows [64] to the valid rows of out [T, Hq D] and lse [T, Hq].

    smem: `panels` to stage through, read until plgpu.wait_smem_to_gmem. A partly valid tile goes in pieces of 32, 16,
    .. 1 rows: the next rows of T belong to other programs.
    """
    s = rows.shape
    tile, staged = views(smem)
    for c, panel in enumerate(out_panels):
        tile[c] = panel
    wg.put_rows(lse_rows, lse, rows.start, rows.head, rows.valid, rows.heads, rows.tile)
    plgpu.commit_smem()

    def copy(i, r, count: int):
        for c in range(s.panels):
            source = staged.at[c, pl.ds(i * rows.tile + r, count)]
            column = (rows.head + i) * s.head_dim + c * PANEL
            plgpu.copy_smem_to_gmem(source, out.at[pl.ds(rows.start + r, count), pl.ds(column, PANEL)])

    @pl.loop(0, rows.heads)
    def _(i):
        @pl.when(rows.valid == rows.tile)
        def _():
            copy(i, 0, rows.tile)

        @pl.when(rows.valid < rows.tile)
        def _():
            count = rows.tile // 2
            while count:
                pl.when(rows.valid & count != 0)(lambda count=count: copy(i, rows.valid & -2 * count, count))
                count //= 2
