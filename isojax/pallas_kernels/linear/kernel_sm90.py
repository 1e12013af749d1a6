"""Linear layers on Hopper: linear.column and linear.row on the shared matrix product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.linear import gemm, tiles
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.schedule import leaf_width, tree


def column(x: jax.Array, weight: jax.Array, *, t: Tiles | None = None) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N] bf16; one chain, one rounding."""
    return chains(x, weight, t or tiles.for_column(x.shape[0], *weight.shape), 1, x.dtype)


def row(x: jax.Array, weight: jax.Array, *, leaves: int, t: Tiles | None = None) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N] bf16; `leaves` chains, a balanced tree, one rounding."""
    t = t or tiles.for_row(x.shape[0], *weight.shape, leaves=leaves)
    if not t.split:
        return chains(x, weight, t, leaves, x.dtype)
    return add_tree(partials(x, weight, t, leaves), x.dtype)


def chains(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int, out_dtype) -> jax.Array:
    """`leaves` chains over K and their tree, on chip, rounded once to out_dtype. K / leaves: a multiple of t.k, or one
    leaf."""
    (rows, k), n = x.shape, weight.shape[0]
    items, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))

    def locate(i):
        r, c = at(i)
        return gemm.Item(r * t.rows, c * t.cols)

    def body(x, w, out, s):
        def finish(_, r, c, total):
            gemm.store(out, s, r, c, total)

        steps = leaf_width(k, leaves) // t.k
        gemm.product(x, w, s, t, items=items, locate=locate, steps=steps, leaves=leaves, finish=finish)

    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    s = gemm.scratch(t, leaves, out_dtype, gemm.chunk(t.n, n, out_dtype))
    return gemm.launch(body, out, t, items, s)(x, weight)


def partials(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int) -> jax.Array:
    """The chain of every leaf, not rounded: [leaves, T, N] fp32. A leaf is a work item: few rows still fill the GPU."""
    (rows, k), n = x.shape, weight.shape[0]
    width = leaf_width(k, leaves)
    each, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))
    items = leaves * each

    def locate(i):
        r, c = at(jax.lax.div(i, leaves))
        leaf = jax.lax.rem(i, leaves)
        return gemm.Item(r * t.rows, c * t.cols, leaf * width, leaf)

    def body(x, w, out, s):
        def finish(item, r, c, total):
            gemm.store(out.at[item.leaf], s, r, c, total)

        gemm.product(x, w, s, t, items=items, locate=locate, steps=width // t.k, leaves=1, finish=finish)

    out = jax.ShapeDtypeStruct((leaves, rows, n), jnp.float32)
    s = gemm.scratch(t, 1, jnp.float32, gemm.chunk(t.n, n, jnp.float32))
    return gemm.launch(body, out, t, items, s)(x, weight)


def add_tree(parts: jax.Array, dtype) -> jax.Array:
    """[leaves, T, N] fp32 -> [T, N]: the balanced tree over leaves, then one rounding. T a multiple of 64, N of 8."""
    leaves, rows, n = parts.shape
    wide = min(128, n & -n)
    tall = min(64, 1024 // wide)  # up to 8 elements a thread

    def body(parts, out):
        at = pl.ds(jax.lax.axis_index("row") * tall, tall), pl.ds(jax.lax.axis_index("col") * wide, wide)
        out[at] = tree([parts[(i, *at)] for i in range(leaves)], jnp.add).astype(dtype)

    out = jax.ShapeDtypeStruct((rows, n), dtype)
    return plgpu.kernel(body, out_type=out, grid=(rows // tall, n // wide), grid_names=("row", "col"))(parts)


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
    if k % leaves or not tiles.step(k // leaves):
        given = f"K = {k}" + (f" with {leaves} leaves" if leaves > 1 else "")
        mend = "zero-pad each leaf to a multiple of 16 columns" + (", or choose fewer leaves" if leaves > 1 else "")
        raise Unsupported(region, given, "K / leaves a multiple of 16 on sm90", mend)


def column_supports(x, weight) -> None:
    """What linear.column takes on sm90; raises Unsupported."""
    supports("linear.column", x, weight)


def row_supports(x, weight, *, leaves) -> None:
    """What linear.row takes on sm90; raises Unsupported."""
    supports("linear.row", x, weight, leaves)
