"""Linear layers on Hopper: linear.column and linear.row on the shared matrix product."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from isojax import tuning
from isojax.errors import Unsupported
from isojax.pallas_kernels.linear import gemm, meet_sm90, tiles
from isojax.pallas_kernels.linear.tiles import FEW, Tiles


def column(x: jax.Array, weight: jax.Array, *, t: Tiles | None = None) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N] bf16; one chain, one rounding."""
    (n, k), rows = weight.shape, x.shape[0]
    rule = functools.partial(tiles.for_column, rows, n, k)
    t = t or tuning.choose("linear.column", rows, dict(n=n, k=k, leaves=1), rule)
    return chains(x, weight, t, 1, x.dtype)


def row(x: jax.Array, weight: jax.Array, *, leaves: int, t: Tiles | None = None) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N] bf16; `leaves` chains, a balanced tree, one rounding."""
    (n, k), rows = weight.shape, x.shape[0]
    rule = functools.partial(tiles.for_row, rows, n, k, leaves)
    t = t or tuning.choose("linear.row", rows, dict(n=n, k=k, leaves=leaves), rule)
    return (meet_sm90.row if t.split > 1 else chains)(x, weight, t, leaves, x.dtype)


def chains(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int, out_dtype) -> jax.Array:
    """`leaves` chains over K and their tree, on chip, rounded once to out_dtype. K / leaves: see misfit."""
    (rows, k), n = x.shape, len(weight)
    items, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))

    def locate(i):
        r, c = at(i)
        return gemm.Item(r * t.rows, c * t.cols)

    def body(x, w, out, s):
        def finish(_, r, c, *parts):
            gemm.store(out, s, r, c, *parts)

        steps = t.steps(k // leaves)
        gemm.product(x, w, s, t, items=items, locate=locate, steps=steps, leaves=leaves, finish=finish)

    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    s = gemm.scratch(t, leaves, out_dtype, gemm.chunk(t.n, n, out_dtype), halves=t.halves(k // leaves))
    return gemm.launch(body, out, t, items, s, even=rows > FEW)(x, weight)


def supports(region: str, x, weight, leaves: int = 1) -> None:
    """Raise Unsupported unless the sm90 product takes x [T, K], weight [N, K] with this many leaves."""
    (rows, k), n = x.shape, weight.shape[0]
    for name, a in (("x", x), ("weight", weight)):
        if a.dtype != jnp.bfloat16:
            raise Unsupported(region, f"{name} of {a.dtype}", "bfloat16 on sm90", "cast it, or use arch cpu")
    if rows % 64 or not rows:
        raise Unsupported(
            region, f"T = {rows}", "a positive multiple of 64 on sm90", "pad the rows; they change nothing"
        )
    if n % 8 or n < 16:  # measured on an H200: rows of 8 bf16 outputs are stored wrongly
        allowed = "N a multiple of 8, and at least 16, on sm90"
        raise Unsupported(region, f"N = {n}", allowed, "pad the weight with rows of zeros")
    if leaves & (leaves - 1) or leaves < 1:
        raise Unsupported(region, f"{leaves} leaves", "1, 2, 4, 8, ...", "choose the next power of two")
    if k % leaves or not tiles.stride(k // leaves):
        given = f"K = {k}" + (f" with {leaves} leaves" if leaves > 1 else "")
        mend = "zero-pad each leaf to a multiple of 16 columns" + (", or choose fewer leaves" if leaves > 1 else "")
        raise Unsupported(region, given, "K / leaves a multiple of 16 on sm90", mend)


def column_supports(x, weight) -> None:
    """What linear.column takes on sm90; raises Unsupported."""
    supports("linear.column", x, weight)


def row_supports(x, weight, *, leaves) -> None:
    """What linear.row takes on sm90; raises Unsupported."""
    supports("linear.row", x, weight, leaves)
