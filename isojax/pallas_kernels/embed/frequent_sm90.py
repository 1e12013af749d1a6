"""The sums of frequent tokens in the embedding's gradient on sm90: a block adds 128 columns of a token's rows.

A sum is one chain over the rows, ascending. Three warpgroups fetch batches of rows in turns, the fourth adds them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.pallas_kernels.interpretable import await_previous, let_next_start
from isojax.pallas_kernels.strips import THREADS

f32, i32 = jnp.float32, jnp.int32
FREQUENT = 256  # rows from which on a token is frequent: it changes speed, never bits
LOADERS = 3  # warpgroups that fetch
BATCH = 64  # rows that one of them fetches at a time
LANES = 8  # blocks that look for frequent tokens, for each 128 columns
LAYOUT: Any = plgpu.Layout.WG_STRIDED((THREADS,), 1)


def splits(n: int, columns: int) -> bool:
    """Whether frequent tokens are treated apart: there may be some, and their columns fall into whole blocks."""
    return n >= FREQUENT and columns % THREADS == 0


def is_frequent(ranked: Any, rank: jax.Array, token: jax.Array) -> jax.Array:
    """Whether `token`, whose first rank this is, has FREQUENT rows or more."""
    n, last = ranked.shape[0], rank + FREQUENT - 1
    return (last < n) & (ranked[lax.min(last, n - 1)] == token)


def bound(ranked: Any, low: jax.Array, high: jax.Array, below: Any) -> jax.Array:
    """First rank in [low, high] for whose token `below` does not hold, by bisection; high where it holds for all."""
    n = ranked.shape[0]

    def step(_, ends):
        low, high = ends
        middle = lax.div(low + high, 2)
        up = (low < high) & below(ranked[lax.min(middle, n - 1)])
        down = (low < high) & jnp.logical_not(up)
        return jnp.where(up, middle + 1, low), jnp.where(down, middle, high)

    return lax.fori_loop(0, n.bit_length(), step, (low, high))[0]


def add_frequent(order: jax.Array, ranked: jax.Array, ct: jax.Array, into: Any) -> Any:
    """Write frequent tokens' rows of the gradient: to a new [V, D] where `into` is V, else added to the ref `into`.

    order, ranked: see sort_sm90. ct [T, D]. The kernel after this one may start at once.
    """
    n, columns = ct.shape
    adding = not isinstance(into, int)
    candidates = n // FREQUENT if splits(n, columns) else 0  # every frequent token holds one of these ranks
    lanes = max(1, min(LANES, candidates))

    def embed_frequent(order, ranked, ct, grad, ring, full, empty):
        await_previous()
        let_next_start()
        cols, wg = pl.ds(lax.axis_index("piece") * THREADS, THREADS), lax.axis_index("wg")

        def fetch(start, end, used, batches):
            def one(b, _):
                slot = lax.rem(used + b, LOADERS)

                @pl.when(slot == wg - 1)
                def _():
                    ranks = [start + b * BATCH + i for i in range(BATCH)]
                    rows = [order[lax.min(r, end - 1)] for r in ranks]
                    values = [plgpu.load(ct.at[row, cols], layout=LAYOUT) for row in rows]
                    pl.when(used + b >= LOADERS)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    for i, (r, v) in enumerate(zip(ranks, values, strict=True)):
                        # past the end: zeros, which add nothing
                        ring[slot, i] = jnp.where(jnp.full((THREADS,), end - r) > 0, v, jnp.zeros_like(v))
                    plgpu.barrier_arrive(full.at[slot])

            lax.fori_loop(0, batches, one, None)

        def add(used, batches):
            def one(b, total):
                slot = lax.rem(used + b, LOADERS)
                plgpu.barrier_wait(full.at[slot])
                for i in range(BATCH):
                    total = total + plgpu.load(ring.at[slot, i], layout=LAYOUT).astype(f32)
                plgpu.barrier_arrive(empty.at[slot])
                return total

            return lax.fori_loop(0, batches, one, plgpu.layout_cast(jnp.zeros((THREADS,), f32), LAYOUT))

        def candidate(i, used):
            """used: batches so far. A frequent token belongs to the first of these ranks that it holds."""
            p = (i * lanes + lax.axis_index("lane")) * FREQUENT
            token = ranked[p]
            holds = lambda rank: (rank >= 0) & (rank < n) & (ranked[jnp.clip(rank, 0, n - 1)] == token)
            likely = (holds(p - FREQUENT // 2) | holds(p + FREQUENT // 2)) & jnp.logical_not(holds(p - FREQUENT))

            def look():
                start = bound(ranked, lax.max(p - FREQUENT + 1, 0), p, lambda t: t < token)

                def run():
                    end = bound(ranked, p, i32(n), lambda t: t <= token)
                    batches = lax.div(end - start + BATCH - 1, BATCH)
                    pl.when(wg > 0)(lambda: fetch(start, end, used, batches))

                    @pl.when(wg == 0)
                    def _():
                        total = add(used, batches)
                        here = grad.at[token, cols]
                        grad[token, cols] = plgpu.load(here, layout=LAYOUT) + total if adding else total

                    return used + batches

                return lax.cond(is_frequent(ranked, start, token), run, lambda: used)

            return lax.cond(likely, look, lambda: used)

        trips = lax.div(candidates - lax.axis_index("lane") + lanes - 1, lanes)
        used = lax.fori_loop(0, trips, candidate, i32(0))
        pl.when((wg > 0) & (used >= wg))(lambda: plgpu.barrier_wait(empty.at[wg - 1]))

    out = () if adding else jax.ShapeDtypeStruct((into, columns), f32)
    return plgpu.kernel(
        embed_frequent,
        out_type=out,
        grid=(max(1, columns // THREADS), lanes),
        grid_names=("piece", "lane"),
        num_threads=1 + LOADERS,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((LOADERS, BATCH, THREADS), ct.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=LOADERS),
            plgpu.Barrier(num_arrivals=1, num_barriers=LOADERS),
        ),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(order, ranked, ct, *((into,) if adding else ()))
