"""How the Hopper kernels of attn.prep walk over tokens and heads: tiles of 16 tokens, one head at a time.

A token's head lies in 8 lanes of one warp, as two halves of 16-byte (head size 64: 8-byte) accesses. The tile height
is fixed, so a norm's sum is the same tree in any batch: 8 elements of each half in a lane, then 3 shuffles. The rows of
the rope table that a block's tokens need are fetched once, for all of the block's heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax.errors import Unsupported

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

    def mean(self, x: list[jax.Array]) -> jax.Array:
        """Mean over a head's elements, broadcast over them."""
        return lax.broadcast_in_dim(jnp.sum(x[0] + x[1], axis=1) * (1.0 / self.dim), self.shape, [0])

    def rstd(self, x: list[jax.Array], eps: float) -> jax.Array:
        square = jnp.sum(x[0] * x[0] + x[1] * x[1], axis=1)
        return lax.broadcast_in_dim(lax.rsqrt(square * (1.0 / self.dim) + eps), self.shape, [0])

    def gamma(self, norm, zero_centered: bool) -> list[jax.Array]:
        return [g + 1.0 if zero_centered else g for g in self.vector(norm)]


def heads_of(qkv, kv_heads: int, head_dim: int) -> Heads:
    return Heads(kv_heads, qkv.shape[1] // (kv_heads * head_dim) - 2, head_dim)


def fetch_angles(rope, positions, angles, arrived, b: Block, first) -> None:
    """Start copying the rows of the rope table that the block's tokens, from `first` on, need."""

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        for r in range(b.tokens):
            row = pl.ds(positions[first + r], 1)
            plgpu.copy_gmem_to_smem(rope.at[row], angles.at[pl.ds(r, 1)], arrived)


def each_head(b: Block, h: Heads, head) -> None:
    """Call head(i, n, g, j) for each of the warpgroup's heads: its i-th, the row's n-th, the j-th of KV group g."""
    start = lax.axis_index("head") * b.heads + lax.axis_index("wg")

    def one(i, _):
        n = start + i * b.warpgroups
        g = lax.div(n, h.group + 2)
        head(i, n, g, n - g * (h.group + 2))

    lax.fori_loop(0, b.heads // b.warpgroups, one, None)


def launch(body, out, b: Block, h: Heads, tokens: int, scratch: tuple[Any, ...] = ()):
    """plgpu.kernel over all tokens and heads; the body orders its own writes to `scratch`.

    Before `scratch` it gets shared memory for the block's rows of the rope table, and the barrier of their arrival.
    """
    # An explicit tiling, or layout inference swizzles what is written one row at a time.
    tiled = (plgpu.TilingTransform((1, h.half)),)  # pyright: ignore[reportAbstractUsage]
    angles = plgpu.SMEM((b.tokens, h.dim), f32, transforms=tiled)
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(h.count // b.heads, tokens // b.tokens),
        grid_names=("head", "tile"),
        num_threads=b.warpgroups,
        thread_name="wg",
        scratch_types=(angles, plgpu.Barrier(num_arrivals=b.tokens), *scratch),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )


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
