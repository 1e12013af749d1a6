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
    return chains(x, weight, t or tiles.for_column(*x.shape[:1], *weight.shape), 1, x.dtype)


def row(x: jax.Array, weight: jax.Array, *, leaves: int, t: Tiles | None = None) -> jax.Array:
    """x [T, K] bf16 @ weight[N, K].T -> [T, N] bf16; `leaves` chains, a balanced tree, one rounding."""
    t = t or tiles.for_row(*x.shape[:1], *weight.shape, leaves)
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
        return gemm.Item(r * t.rows, c * t.cols, 0)

    def body(x, w, out, s):
        def finish(_, r, c, total):
            gemm.store(out, s, r, c, total)

        steps = -(-leaf_width(k, leaves) // t.k)
        gemm.product(x, w, s, t, items=items, locate=locate, steps=steps, leaves=leaves, finish=finish)

    out = jax.ShapeDtypeStruct((rows, n), out_dtype)
    return gemm.launch(body, out, t, items, gemm.scratch(t, leaves, out_dtype))(x, weight)


def partials(x: jax.Array, weight: jax.Array, t: Tiles, leaves: int) -> jax.Array:
    """The chain of every leaf, not rounded: [leaves, T, N] fp32. A leaf is a work item: few rows still fill the GPU."""
    (rows, k), n = x.shape, weight.shape[0]
    width = leaf_width(k, leaves)
    tiles_each, at = gemm.snake(t, -(-rows // t.rows), -(-n // t.cols))

    def locate(i):
        r, c = at(jax.lax.div(i, leaves))
        return gemm.Item(r * t.rows, c * t.cols, jax.lax.rem(i, leaves) * width)

    def body(x, w, out, s):
        def finish(item, r, c, total):
            gemm.store(out.at[jax.lax.div(item.depth, width)], s, r, c, total)

        product = dict(items=leaves * tiles_each, locate=locate, steps=width // t.k, leaves=1)
        gemm.product(x, w, s, t, **product, finish=finish)

    out = jax.ShapeDtypeStruct((leaves, rows, n), jnp.float32)
    return gemm.launch(body, out, t, leaves * tiles_each, gemm.scratch(t, 1, jnp.float32))(x, weight)


def add_tree(parts: jax.Array, dtype) -> jax.Array:
    """[leaves, T, N] fp32 -> [T, N]: the balanced tree over leaves, then one rounding. T a multiple of 64."""
    leaves, rows, n = parts.shape

    def body(parts, out):
        at = pl.ds(jax.lax.axis_index("row") * 8, 8), pl.ds(jax.lax.axis_index("col") * 128, 128)
        out[at] = tree([parts[(i, *at)] for i in range(leaves)], jnp.add).astype(dtype)

    grid = dict(grid=(rows // 8, n // 128), grid_names=("row", "col"))
    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((rows, n), dtype), **grid)(parts)


def supports(region: str, x, weight, leaves: int = 1) -> None:
    """Raise Unsupported unless the sm90 product takes x [T, K], weight [N, K] with this many leaves."""
    (rows, k), n = x.shape, weight.shape[0]
    for name, a in (("x", x), ("weight", weight)):
        if a.dtype != jnp.bfloat16:
            raise Unsupported(region, f"{name} of {a.dtype}", "bfloat16 on sm90", "cast it, or use arch cpu")
    if rows % 64 or not rows:
        raise Unsupported(region, f"T = {rows}", "T a positive multiple of 64 on sm90", "pad the rows")
    if n % 8:
        raise Unsupported(region, f"N = {n}", "N a multiple of 8 on sm90 (TMA strides)", "pad the weight's rows")
    if leaves == 1 and k % 8:
        raise Unsupported(region, f"K = {k}", "K a multiple of 8 on sm90 (TMA strides)", "pad K with zeros")
    if leaves > 1 and (k % leaves or not tiles.step(k // leaves)):
        mend = "zero-pad each leaf to a multiple of 16 columns, or choose fewer leaves"
        allowed = "K / leaves a multiple of 16 on sm90"
        raise Unsupported(region, f"K = {k} with {leaves} leaves", allowed, mend)
