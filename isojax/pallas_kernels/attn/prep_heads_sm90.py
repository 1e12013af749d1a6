"""How the Hopper kernels of attn.prep walk over tokens and heads: tiles of 16 tokens, one head at a time.

A token's head lies in 8 lanes of one warp, as two halves of 16-byte (head size 64: 8-byte) accesses. The tile height
is fixed, so a norm's sum is the same tree in any batch: 8 elements of each half in a lane, then 3 shuffles. Where a
product and a sum meet, `fma` says so: the kernels' bits do not hang on what the compiler makes of the code around them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from isojax._jax_internals import interpreting
from isojax.errors import Unsupported
from isojax.pallas_kernels.fused import fma
from isojax.pallas_kernels.warpgroup import registers as reg

f32 = jnp.float32
TOKENS = 16  # of a tile
HEAD_DIMS = (64, 128)


class Block(NamedTuple):
    """A block's share: `tiles` tiles of 16 tokens, `heads` neighbouring heads, dealt out to `warpgroups`."""

    tiles: int
    heads: int
    warpgroups: int

    @property
    def tokens(self) -> int:
        return self.tiles * TOKENS


class Heads(NamedTuple):
    """The packed heads of a row: for each of `kv_heads` groups its `group` q heads, its k, its v."""

    kv_heads: int
    group: int
    dim: int

    @property
    def count(self) -> int:
        return self.kv_heads * (self.group + 2)

    @property
    def half(self) -> int:
        return self.dim // 2

    @property
    def shape(self) -> tuple[int, int]:
        return TOKENS, self.half

    @property
    def layout(self) -> Any:
        tiling = plgpu.Tiling(((TOKENS, self.half), (TOKENS // 4, self.half), (self.half // 8,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)

    def load(self, ref, start=0) -> list[jax.Array]:
        """Two [16, D/2] tiles from column `start` of a [16, ..] ref."""
        at = lambda o: ref.at[:, pl.ds(start + o, self.half)]
        return [plgpu.load(at(o), layout=self.layout, optimized=False) for o in (0, self.half)]

    def store(self, ref, start, tile) -> None:
        """Write two [16, D/2] tiles to column `start` of a [16, ..] ref."""
        for o, x in zip((0, self.half), tile, strict=True):
            ref[:, pl.ds(start + o, self.half)] = x.astype(ref.dtype)

    def vector(self, ref, start=0) -> list[jax.Array]:
        """The same of a vector, broadcast over the tokens, in fp32."""
        at = lambda o: ref.at[pl.ds(start + o, self.half)]
        values = [plgpu.load(at(o), layout=self.layout.reduce(0), optimized=False) for o in (0, self.half)]
        return [lax.broadcast_in_dim(v.astype(f32), self.shape, [1]) for v in values]

    def mean_product(self, a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
        """Mean of a b over a head's elements, broadcast over them."""
        return lax.broadcast_in_dim(jnp.sum(self.dot(a, b), axis=1) * (1.0 / self.dim), self.shape, [0])

    def dot(self, a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
        """a[0] b[0] + a[1] b[1], the second product rounded."""
        return fma(a[0], b[0], a[1] * b[1], self.layout)

    def rstd(self, x: list[jax.Array], eps: float) -> jax.Array:
        square = jnp.sum(self.dot(x, x), axis=1)
        return lax.broadcast_in_dim(lax.rsqrt(square * (1.0 / self.dim) + eps), self.shape, [0])

    def gamma(self, norm, zero_centered: bool) -> list[jax.Array]:
        return [g + 1.0 if zero_centered else g for g in self.vector(norm)]


def heads_of(qkv, kv_heads: int, head_dim: int) -> Heads:
    return Heads(kv_heads, qkv.shape[1] // (kv_heads * head_dim) - 2, head_dim)


def place(h: Heads, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(g, j): head n of a row is the j-th of KV group g."""
    g = lax.div(n, h.group + 2)
    return g, n - g * (h.group + 2)


def angles(h: Heads, rope: Any, positions: Any, first: jax.Array) -> list[jax.Array]:
    """cos and sin [16, D/2] of the 16 tokens from `first` on: each thread reads its part of its token's row.

    rope [P, D] fp32 and positions [T] int32 in GMEM. Below Pallas, which has no gather into registers.
    """
    if interpreting():
        rows = jnp.stack([rope[positions[first + r]] for r in range(TOKENS)])
        return [rows[:, : h.half], rows[:, h.half :]]
    tile: Any = plgpu.ShapeDtypeStruct(h.shape, f32, layout=h.layout)
    lanes = 8  # of a token

    @reg.inline(arg_types=(reg.PLAIN, reg.PLAIN, reg.SCALAR), return_type=(tile, tile))
    def run(_, table, at, start):
        i32_type, i64, f32_type = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
        wide = lambda x: arith.extsi(i64, x)
        element = lambda ref, index, kind: utils.getelementptr(utils.memref_ptr(ref), [index], kind)
        thread, width = reg.thread(), h.half // lanes
        token = arith.addi(start.registers.item(), arith.divui(thread, reg.integer(lanes)))
        position = llvm.load(i32_type, element(at, wide(token), i32_type))
        column = arith.muli(arith.remui(thread, reg.integer(lanes)), reg.integer(width))
        line = arith.addi(arith.muli(wide(position), utils.c(h.dim, i64)), wide(column))
        halves = []
        for o in (0, h.half):
            where = element(table, arith.addi(line, utils.c(o, i64)), f32_type)
            registers = np.empty(h.layout.to_mgpu().registers_shape(h.shape), object)
            registers[...] = llvm.load(ir.VectorType.get((width,), f32_type), where, alignment=16)
            halves.append(mgpu.FragmentedArray(_registers=registers, _layout=h.layout.to_mgpu(), _is_signed=None))
        return tuple(halves)

    return list(run(rope, positions, jnp.asarray(first, jnp.int32)))


def check(region: str, qkv, params: dict[str, Any], rope, head_dim: int, quantum: int) -> None:
    """Raise Unsupported unless the kernels take these operands; `quantum` divides the rows."""

    def refuse(given, allowed, mend):
        raise Unsupported(region, given, allowed, mend)

    if head_dim not in HEAD_DIMS:
        refuse(f"head_dim {head_dim}", f"{HEAD_DIMS} on sm90", "use the cpu arch")
    if qkv.shape[0] % quantum:
        refuse(f"{qkv.shape[0]} rows", f"a multiple of {quantum}", "pad the rows (padding rows change nothing)")
    for name, a in {"qkv": qkv, **params}.items():
        if a is not None and a.dtype != jnp.bfloat16:
            refuse(f"{name} of {a.dtype}", "bfloat16 on sm90", "cast weights when loading them")
    if rope.dtype != f32 or rope.shape[1] != head_dim:
        refuse(f"a rope table {rope.dtype}{list(rope.shape)}", f"float32[P, {head_dim}]", "use isojax.model.rope")
