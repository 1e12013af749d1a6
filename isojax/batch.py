"""From requests to the padded arrays of a step, on the host. Every runtime packs with this module.

T is rounded up to a bucket so that few shapes are compiled; padding rows are exact no-ops for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from isojax.errors import InputError
from isojax.model.dense import Batch
from isojax.pallas_kernels.attn import work
from isojax.schedule import ROW_TILE

ROW_QUANTUM = {"cpu": ROW_TILE, "sm90": 64}  # rows that an arch's kernels take at a time
FINE = 512  # rows from which products are bound by arithmetic: there padding is time, so buckets lie closer


@functools.cache
def bucket(n: int, arch: str) -> int:
    """Rows that n rows are padded to: the quantum times 1, 2, 3, 4, 6, 8, 12, 16, ...: from the third on at most a
    third is padding. From FINE rows on four to a doubling (sm90: times 8, 10, 12, 14, 16): at most a fifth; from twice
    as many on eight (times 16, 18, 20, ...): at most a ninth.
    """
    quantum = ROW_QUANTUM[arch]
    tiles = -(-max(n, 1) // quantum)
    power = 1 << max(0, (tiles - 1).bit_length() - 1)
    parts = 2 if power * quantum < FINE else 4 if power * quantum < 2 * FINE else 8
    return quantum * next(t for i in range(parts + 1) if (t := power + power * i // parts) >= tiles)


def buckets(rows: int, arch: str) -> list[int]:
    """Every bucket up to `rows`, ascending."""
    found = [bucket(1, arch)]
    while (larger := bucket(found[-1] + 1, arch)) <= rows:
        found.append(larger)
    return [b for b in found if b <= rows]


def request_bucket(n: int) -> int:
    """Requests that n requests are padded to: powers of two from 8 up."""
    return max(8, 1 << (n - 1).bit_length())


def check_tokens(prompts: Sequence[Sequence[int]], vocab: int, longest: int) -> None:
    """Raises InputError for an empty or too long prompt or a token id outside the vocabulary."""
    for i, p in enumerate(prompts):
        if len(p) == 0:
            raise InputError(f"prompt {i} is empty; give at least one token")
        if len(p) > longest:
            raise InputError(f"prompt {i} has {len(p)} tokens; at most {longest} fit; shorten it")
        low, high = min(p), max(p)
        if low < 0 or high >= vocab:
            raise InputError(f"prompt {i} has token id {low if low < 0 else high}; allowed are 0 to {vocab - 1}")


def pad(x: np.ndarray, n: int, fill: Any = 0) -> np.ndarray:
    """x with its first axis padded to n."""
    out = np.full((n, *x.shape[1:]), fill, x.dtype)
    out[: len(x)] = x
    return out


def packed(lens: Sequence[int], group: int, arch: str, rope: Any, rows: int | None = None) -> Batch:
    """Whole sequences one after the other, keys their own: training and scoring. cu_q cuts the packed rows.

    Padding rows form one more sequence at the end, so that they are finite numbers too (a gradient multiplies them
    by zero, and zero times NaN is NaN).
    """
    count = int(sum(lens))
    t = rows or bucket(count, arch)
    r = request_bucket(len(lens) + 1)
    query = pad(np.array([*lens, t - count], np.int32), r)
    cu_q = np.concatenate([[0], np.cumsum(query)]).astype(np.int32)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lens] + [np.zeros(t - count, np.int32)])
    tile = work.tile_rows(arch, group)
    items = work.work_list(query, tile, work.capacity(t, r, tile))
    return Batch(position, cu_q, query, items, rope, None, None, tile)


def paged(
    query: Sequence[int],
    context: Sequence[int],
    table: np.ndarray,
    page: int,
    group: int,
    arch: str,
    rope: Any,
) -> Batch:
    """A step over a paged cache: request r has `query[r]` new tokens and `context[r]` tokens with them.

    table [R, M]: pages of each request; page 0 is nobody's and takes the writes of padding rows.
    """
    count = int(sum(query))
    t, r = bucket(count, arch), request_bucket(len(query))
    q, lens = pad(np.asarray(query, np.int32), r), pad(np.asarray(context, np.int32), r)
    cu_q = np.concatenate([[0], np.cumsum(q)]).astype(np.int32)
    full = pad(np.asarray(table, np.int32), r)
    request = np.repeat(np.arange(r), q)
    position = (lens[request] - q[request] + np.arange(count) - cu_q[request]).astype(np.int32)
    slots = (full[request, position // page] * page + position % page).astype(np.int32)
    tile = work.tile_rows(arch, group, longest=max(query))
    items = work.work_list(q, tile, work.capacity(t, r, tile))
    return Batch(pad(position, t), cu_q, lens, items, rope, full, pad(slots, t), tile)
