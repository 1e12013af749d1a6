"""What attn.core_bwd's sm90 kernels share: the work they split, the tiles they move, and their products.

A work item is (request, level). Both main kernels work on tiles of 128 rows of one request: `level` tiles of keys lie
at or before the query tile that the item names, and as many query tiles at or after its key tile. So one list, longest
items first, balances both. The rows behind the last request are one more request, whose gradients are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.attn.reference_bwd import CHAIN_HEADS
from isojax.pallas_kernels.attn.tiles_sm90 import PANEL, ROWS, Packed

CONSUMERS = 2  # warpgroups that compute; one more fetches
TILE = CONSUMERS * ROWS
REGISTERS = {"produce": 24, "consume": 240}
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16
WGMMA = plgpu.Layout.WGMMA
PARAMS = plgpu.CompilerParams(approx_math=True)  # exp2 is one instruction


@dataclass(frozen=True)
class Shape(Packed):
    """Static facts of one call."""

    requests: int

    @property
    def chains(self) -> int:
        """Chains per KV head."""
        return -(-self.group // CHAIN_HEADS)

    @property
    def items(self) -> int:
        """Most work items: whole tiles of all tokens, and a partial one per request and behind the last."""
        return self.tokens // TILE + self.requests + 1

    @property
    def levels(self) -> int:
        """Most tiles of one request."""
        return -(-self.tokens // TILE)

    @property
    def stats(self) -> tuple[int, int, int, int]:
        """Shape of the statistics: [Hq, kind, copy, ..]. Token t is at t of copy 0 and at t + 1 of copy 1, so that
        pairs of tokens from any row on are aligned in one of them. A tile may reach past the last token."""
        return self.q_heads, 2, 2, self.tokens + TILE + 2


# -- work --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Span:
    """One request's rows; device scalars. padding: they belong to no request."""

    start: jax.Array
    length: jax.Array
    padding: jax.Array

    @property
    def tiles(self) -> jax.Array:
        return lax.div(self.length + (TILE - 1), i32(TILE))


def span(s: Shape, cu_q: Any, request: jax.Array) -> Span:
    padding = request == s.requests
    start = cu_q[request]
    stop = jnp.where(padding, s.tokens, cu_q[lax.min(request + 1, i32(s.requests))])
    return Span(start, stop - start, padding)


def of_item(s: Shape, cu_q: Any, work: Any, item: jax.Array) -> Callable[[Callable[[Span], None]], None]:
    """Decorator: runs its function on the rows of the item's request, unless the item is no work."""
    request = work[item, 0]
    return lambda run: pl.when(request >= 0)(lambda: run(span(s, cu_q, request)))


# -- tiles -------------------------------------------------------------------------------------------------------------
def fetch(source: Callable[[Any, Any], Any], row: jax.Array, landing: Any, barrier: Any) -> None:
    """Start the copies of rows from `row` on into landing [panels, n 64, 64]: one per panel and 64 rows.

    source(rows, columns): that part of GMEM. Rows past the end of the array read as zero.
    """
    for c in range(landing.shape[0]):
        for r in range(0, landing.shape[1], ROWS):
            part = source(pl.ds(row + r, ROWS), pl.ds(c * PANEL, PANEL))
            plgpu.copy_gmem_to_smem(part, landing.at[c, pl.ds(r, ROWS)], barrier)


def drain(free: Any) -> None:
    """Wait until every stage of a ring was read for the last time."""
    for i in range(free.shape[0]):
        plgpu.barrier_wait(free.at[i])


def clear_rows(panels: Sequence[Any], first: jax.Array, wg: jax.Array, done: Any) -> None:
    """Zero the rows of panels [n 64, 64] from `first` on: what lies there may be NaN, and 0 * NaN is NaN.

    The consumer warpgroups share the work, and meet at the barrier `done`.
    """
    parts = [(panel, r) for panel in panels for r in range(0, panel.shape[0], ROWS)]
    for turn in range(CONSUMERS):

        @pl.when(wg == turn)
        def _(mine=parts[turn::CONSUMERS]):
            for panel, r in mine:
                here = panel.at[pl.ds(r, ROWS)]
                row = plgpu.broadcasted_iota(i32, (ROWS, PANEL), 0, layout=WGMMA)
                value = plgpu.load(here, layout=WGMMA)
                here[...] = jnp.where(row < first - r, value, jnp.zeros_like(value))
            plgpu.commit_smem()

    plgpu.barrier_arrive(done)
    plgpu.barrier_wait(done)


def store_rows(copy: Callable[[Any, int], None], valid: jax.Array) -> None:
    """copy(first row, count) for the first `valid` of 64 rows, in chunks of powers of two, and wait."""
    pl.when(valid >= ROWS)(lambda: copy(0, ROWS))
    count = ROWS // 2
    while count:
        chosen = (valid < ROWS) & ((valid & count) != 0)
        pl.when(chosen)(lambda count=count: copy(valid & -(2 * count), count))
        count //= 2
    plgpu.wait_smem_to_gmem(0)


def spare_smem(keys: int) -> dict[str, Any]:
    """The interpreter's stand-in for a left operand in registers; nothing on a GPU. See `multiply_in`."""
    return dict(spare=plgpu.SMEM((CONSUMERS, ROWS, keys), bf16)) if interpreting() else {}


def spare_of(smem: dict[str, Any], wg: jax.Array) -> Any:
    """A warpgroup's part of `spare_smem`; None on a GPU."""
    return smem["spare"].at[wg] if "spare" in smem else None


def multiply_in(acc: Any, a: jax.Array, b: Any, spare: Any) -> None:
    """acc += a @ b, asynchronously. acc [64, N], a [64, K] bf16 in registers, b [K, N] in SMEM.

    The interpreter knows no wgmma with a left operand in registers: there it goes through `spare`.
    """
    if interpreting():
        spare[...] = a
        plgpu.commit_smem()
        plgpu.wgmma(acc, spare, b)
    else:
        plgpu.wgmma(acc, a, b)


def numbers_smem() -> Any:
    """0 .. 127 for each consumer warpgroup. An iota would be the same value in every step of a loop, and LLVM would
    keep its whole tile in registers throughout; a load stays where it is. Two copies, one for each axis of a tile: a
    single load would be merged, and it cannot have both layouts."""
    return plgpu.SMEM((CONSUMERS, 2, TILE), i32)


def number(numbers: Any) -> None:
    """Fill one warpgroup's numbers."""
    for axis in range(2):
        numbers[axis] = plgpu.broadcasted_iota(i32, (TILE,), 0, layout=plgpu.Layout.WG_STRIDED((TILE,), 1))


def causal(x: jax.Array, most: jax.Array, numbers: Any, keys: int) -> jax.Array:
    """Tile x of scores' gradients or the like, zero where a key comes after its row.

    most: what a visible key's number may exceed its row's by, both counted within the tile. keys: the axis of keys.
    """

    def mask(x):
        def count(axis):
            here = numbers.at[axis, pl.ds(0, x.shape[axis])]
            return spread(plgpu.load(here, layout=WGMMA.reduce(1 - axis)), x, axis)

        return plgpu.layout_cast(jnp.where(count(keys) <= count(1 - keys) + most, x, jnp.zeros_like(x)), WGMMA)

    return plgpu.layout_cast(lax.cond(most < x.shape[keys], mask, lambda x: plgpu.layout_cast(x, WGMMA), x), WGMMA)


def spread(vector: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """A vector along `axis` of a tile shaped like `like`. Layouts are named wherever inference would search for them:
    its search is exponential in what it has to guess."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, like.shape, (axis,)), WGMMA)


def own_rows(wg: jax.Array) -> Any:
    """The warpgroup's 64 of 128 rows, as a slice that the compiler cannot see to be the same in every step: it would
    compute all wgmma descriptors of what stays in shared memory before the loop, and keep them in registers."""
    return pl.ds(lax.optimization_barrier(wg) * ROWS, ROWS)


def accumulators(count: int, columns: int = PANEL) -> list[Any]:
    return [plgpu.ACC((ROWS, columns), f32) for _ in range(count)]  # pyright: ignore[reportPrivateImportUsage]


def landed(acc: Any, pending: int) -> jax.Array:
    """The accumulator's value, once at most `pending` wgmma groups are in flight; no use of it moves up before that."""
    return plgpu.layout_cast(lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=pending)), WGMMA)
