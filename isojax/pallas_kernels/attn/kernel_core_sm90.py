"""attn.core on Hopper: what it takes, and which of its two kernels a call gets. Both give a row the same bits."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from isojax.errors import Unsupported
from isojax.pallas_kernels.attn.kernel_decode_sm90 import decode
from isojax.pallas_kernels.attn.kernel_prefill_sm90 import prefill
from isojax.pallas_kernels.attn.reference import core_supports
from isojax.pallas_kernels.attn.tiles_sm90 import CHUNK, DECODE_HEADS, ROWS, Shape

TILES = (1, 8, 16, 32, 64, 128)


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
    if tile == 1 and table is None:
        raise refuse("tile 1 over the batch's own keys", "pages", "take tile_rows('sm90', group)")
    if table is not None and kv.shape[1] % 16:  # shorter ones, which no gate runs, take more addresses than registers
        raise refuse(f"pages of {kv.shape[1]} tokens", "16, 32, 64, 128, ...", "change block_size")
    least = max(min(tile, ROWS), CHUNK if table is None else 1, -(-DECODE_HEADS // heads) if tile == 1 else 1)
    if t < least:
        raise refuse(f"{t} query rows", f"at least {least} here", "pad the batch")


def core(q, kv, table, cu_q, lens, work, *, scale, tile):
    run = decode if tile == 1 else prefill
    return run(q, kv, table, cu_q, lens, work, scale=scale, shape=shape_of(q, kv, table, work, tile))


def shape_of(q, kv, table, work, tile: int) -> Shape:
    t, heads, d = q.shape
    page = 0 if table is None else kv.shape[1]
    return Shape(t, heads, kv.shape[-2], d, tile, page, t if table is None else table.shape[1] * page, work.shape[0])
