"""Work lists of attn.core: which tile of query rows each program computes. They change speed, never bits."""

from __future__ import annotations

import numpy as np

from isojax.schedule import ROW_TILE

MMA_ROWS = 128  # of the two warpgroups of a program; grouped heads are packed into them


def tile_rows(arch: str, group: int, longest: int | None = None) -> int:
    """Query rows in one tile. On sm90 the `group` query heads of a KV head share the 128 MMA rows.

    sm90 takes powers of two from 8 up, so that a head's rows lie on an 8-row boundary, and 1: the decode kernels.
    longest: most query rows of any request where that is known before anything runs; 1 asks for the decode kernels.
    """
    if arch == "cpu":
        return ROW_TILE
    if longest == 1:
        return 1
    return 1 << max(3, (MMA_ROWS // group).bit_length() - 1)


def capacity(tokens: int, requests: int, tile: int) -> int:
    """Most tiles that `tokens` query rows in `requests` requests can need: the static length of a work list."""
    return min(tokens, requests + tokens // tile)


def work_list(query_lens: np.ndarray, tile: int, size: int) -> np.ndarray:
    """[size, 2] int32: (request, first row) per tile, then (-1, 0). Raises ValueError where `size` is too small.

    Later rows, which see more keys, come first: programs start in this order, and the long ones should not be last.
    """
    tiles = -(-np.asarray(query_lens, np.int64) // tile)
    total = int(tiles.sum())
    if total > size:
        raise ValueError(f"{total} attention tiles do not fit a work list of {size}")
    out = np.tile(np.array([[-1, 0]], np.int32), (size, 1))
    request = np.repeat(np.arange(len(tiles)), tiles)
    first = np.arange(total) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    order = np.argsort(-first, kind="stable")
    out[:total, 0], out[:total, 1] = request[order], first[order] * tile
    return out
