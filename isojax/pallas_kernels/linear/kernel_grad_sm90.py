"""Gradients of linear layers on Hopper: linear.dgrad and linear.wgrad on the shared matrix product.

Both contract over the rows of an operand that lies in memory rows first, so the product reads it as [K, rows]; wgmma
takes bf16 operands either way. One chain in ascending order of the contraction, one rounding for dgrad, none for wgrad.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported
from isojax.pallas_kernels.linear import gemm
from isojax.pallas_kernels.linear.tiles import FEW, Tiles, stride, waves

DGRAD = (False, True)  # ct [T, N] @ weight [N, K]: the weight has the contraction first
WGRAD = (True, True)  # ct [T, N].T @ x [T, K]: both have
START = 64  # what `start` is a multiple of


def dgrad(ct: jax.Array, weight: jax.Array, *, t: Tiles | None = None) -> jax.Array:
    """ct [T, N] bf16 @ weight [N, K] -> [T, K] bf16: one chain over N, one rounding."""
    t = t or tiles_of(ct.shape[0], weight.shape[1], ct.shape[1])
    return multiply(ct, weight, DGRAD, t, jax.ShapeDtypeStruct((ct.shape[0], weight.shape[1]), ct.dtype))


def wgrad(ct: jax.Array, x: jax.Array, into: jax.Array | None = None, *, t: Tiles | None = None) -> jax.Array:
    """ct [T, N] bf16, x [T, K] -> ct.T @ x, [N, K] fp32: one chain over T, not rounded, or added to `into`."""
    t = t or tiles_of(ct.shape[1], x.shape[1], ct.shape[0])
    if into is not None:
        total = jax.new_ref(into)
        multiply(ct, x, WGRAD, t, total, add=total)
        return jax.freeze(total)
    return multiply(ct, x, WGRAD, t, jax.ShapeDtypeStruct((ct.shape[1], x.shape[1]), jnp.float32))


def multiply(
    a: Any, b: Any, first: tuple[bool, bool], t: Tiles, out: Any, *, add: Any = None, start: Any = None, moves: str = ""
) -> Any:
    """a @ b as single chains, [rows, K] @ [K, cols] -> [rows, cols], on arrays or refs.

    first: whether a and b lie in memory with K first. out: a ShapeDtypeStruct, whose array is returned, or a ref that
    is written. add: fp32 [rows, cols] that the product is added to, rounded as fp32 and then to out; it may be out
    itself. start: int32 [1], the first row of b (moves="b") or of out (moves="out") that the product concerns.
    """
    rows, depth = a.shape[::-1] if first[0] else a.shape
    cols = b.shape[1]
    fresh = isinstance(out, jax.ShapeDtypeStruct)
    in_place = add is not None and add is out
    stored = storage(first, t, rows, cols)
    items, locate_block = gemm.snake(t, -(-rows // t.rows), -(-cols // t.cols))
    wide = math.gcd(t.n, cols, 128)  # a block of this many columns lies inside of out, or outside

    def locate(i):
        r, c = locate_block(i)
        return gemm.Item(r * t.rows, c * t.cols)

    present = [("a", a), ("b", b), ("start", start), ("add", None if in_place else add), ("out", out)]
    present = [(name, v) for name, v in present if v is not None and not (fresh and name == "out")]
    names = [name for name, _ in present] + ["out"] * fresh

    def body(*refs):
        *refs, s = refs
        ref = dict(zip(names, refs, strict=True))
        begin = pl.multiple_of(ref["start"][0], START) if start is not None else 0
        b, out = ref["b"], ref["out"]
        whole = out.shape[0]
        if moves == "b":
            b = b.at[pl.ds(begin, depth)]
        if moves == "out":
            out = out.at[pl.ds(begin, rows)]
        plus: Any = out if in_place else ref.get("add")
        inside = whole - begin if moves == "out" else rows  # the last rows of `out` may lie past its end

        def finish(_, row, col, total):
            if plus is None:
                gemm.store(out, s, row, col, total)
                return
            for i in range(0, t.m, 64):
                for j in range(0, t.n, wide):

                    @pl.when((row + i < rows) & (row + i < inside) & (col + j < cols))
                    def _(i=i, j=j):
                        here = plus.at[pl.ds(row + i, 64), pl.ds(col + j, wide)]
                        old = plgpu.load(here, layout=plgpu.Layout.WGMMA, optimized=False)
                        gemm.store(out, s, row + i, col + j, old + total[i : i + 64, j : j + wide])

        gemm.product(
            ref["a"], b, s, t, items=items, locate=locate, steps=depth // t.k, leaves=1, finish=finish, stored=stored
        )

    dtype = out.dtype
    s = gemm.scratch(t, 1, dtype, gemm.chunk(t.n, cols, dtype), stored)
    even = min(rows, depth) > FEW
    return gemm.launch(body, out if fresh else (), t, items, s, even)(*[v for _, v in present])


def storage(first: tuple[bool, bool], t: Tiles, rows: int, cols: int) -> gemm.Stored:
    """How the operands of these tiles lie in shared memory."""
    widths = (*((t.m, rows) if first[0] else ()), *((t.n, cols) if first[1] else ()))
    return gemm.Stored(*first, functools.reduce(math.gcd, widths, min(64, t.k)))


def tiles_of(rows: int, cols: int, depth: int) -> Tiles:
    """Tiles of [rows, cols], a contraction over `depth`: those whose waves over the GPU take least. Free to tune."""
    k = stride(depth)
    options = {  # time of one block tile, of the largest; measured on an H200
        Tiles(128, 128, k, (2, 1), snake=16): 1.0,
        Tiles(64, 192, k, (2, 1)): 0.77,
        Tiles(64, 128, k, (2, 1), snake=2 if rows <= 2048 else 8): 0.52,
        Tiles(64, 64, k, (2, 1)): 0.33,
    }
    if rows > FEW:  # of fewer rows, fewer tiles would fetch the other operand
        options[Tiles(64, 128, k, (1, 1))] = 0.315
    return min(options, key=lambda t: waves(rows, cols, t.rows, t.cols) * options[t])


def supports(region: str, rows: int, **operands) -> None:
    """Raise Unsupported unless operands are bf16, the `rows` tokens a multiple of 64, and widths multiples of 16."""
    if rows % 64 or not rows:
        raise Unsupported(region, f"T = {rows}", "a positive multiple of 64 on sm90", "pad with rows of zeros")
    for name, a in operands.items():
        if a.dtype != jnp.bfloat16:
            raise Unsupported(region, f"{name} of {a.dtype}", "bfloat16 on sm90", "cast it, or use arch cpu")
        for width in a.shape:
            if width % 16:
                given = f"{name} of shape {tuple(a.shape)}"
                raise Unsupported(region, given, "widths that are multiples of 16 on sm90", "pad with zeros")


def dgrad_supports(ct, weight) -> None:
    """What linear.dgrad takes on sm90; raises Unsupported."""
    supports("linear.dgrad", ct.shape[0], ct=ct, weight=weight)


def wgrad_supports(ct, x, into=None) -> None:
    """What linear.wgrad takes on sm90; raises Unsupported."""
    supports("linear.wgrad", ct.shape[0], ct=ct, x=x)
    if into is not None and ct.shape[1] % 64:
        mend = "add the gradient afterwards"
        raise Unsupported("linear.wgrad", f"N = {ct.shape[1]} with `into`", "a multiple of 64 on sm90", mend)
