"""Fixed-order reductions as values: leaves, trees, tiles and partitions, shared by kernels and references.

Nothing in this module depends on batch size, occupancy or rank count: that is what keeps the bits (docs/bits.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")

ROW_TILE = 16  # rows that the cpu arch computes at a time; XLA's CPU dots keep their bits at this height
LEAVES = 8  # parts of a row-parallel contraction and of the vocabulary; >= the largest TP that is claimed
LEAF_QUANTUM = 16  # a leaf is zero-padded to a multiple of this, the K of one bf16 MMA
KV_PARTITION = 768  # keys in one partition of the attention's softmax
KV_TILE = 128  # keys in one step of the online softmax
VOCAB_TILE = 128  # logits in one step of the log-sum-exp
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def tree[T](parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Balanced binary tree, lower index on the left. len(parts) must be a power of two."""
    if len(parts) & (len(parts) - 1) or not parts:
        raise ValueError(f"a balanced tree takes 1, 2, 4, ... parts; given {len(parts)}")
    while len(parts) > 1:
        parts = [add(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
    return parts[0]


def leaf_width(k: int, leaves: int = LEAVES) -> int:
    """Columns in one leaf of a contraction over k. k must be a multiple of `leaves`."""
    if k % leaves:
        raise ValueError(f"a contraction of {k} does not fall into {leaves} equal leaves")
    return k // leaves


def padded(n: int, quantum: int) -> int:
    """n rounded up to a multiple of quantum."""
    return -(-n // quantum) * quantum


def vocab_leaves(vocab: int, leaves: int = LEAVES) -> list[tuple[int, int]]:
    """[start, stop) of each vocabulary leaf, cut from the true vocabulary size; the last ones may be shorter."""
    width = -(-vocab // leaves)
    return [(min(i * width, vocab), min((i + 1) * width, vocab)) for i in range(leaves)]


def fold_halves(x: jax.Array, op: Callable[[jax.Array, jax.Array], jax.Array], fill: float) -> jax.Array:
    """Reduce the last axis by halving: element i with element i + n/2. [..., n] -> [...].

    n is padded to a power of two with `fill`, the operation's neutral value. Only elementwise operations are used, so a
    row's bits cannot depend on how many rows there are.
    """
    n = x.shape[-1]
    size = 1 << max(0, (n - 1).bit_length())
    if size != n:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - n)], constant_values=fill)
    while size > 1:
        size //= 2
        x = op(x[..., :size], x[..., size:])
    return x[..., 0]


def sum_halves(x: jax.Array) -> jax.Array:
    """Sum over the last axis by halving; see fold_halves."""
    return fold_halves(x, jnp.add, 0.0)


def max_halves(x: jax.Array) -> jax.Array:
    """Maximum over the last axis by halving; see fold_halves."""
    return fold_halves(x, jnp.maximum, -jnp.inf)


def check_tiles(rows: int) -> None:
    """Raise ValueError unless `rows` is what `by_row_tiles` takes."""
    if rows % ROW_TILE or rows == 0:
        raise ValueError(f"{rows} rows are no positive multiple of {ROW_TILE}; pad them (padding rows change nothing)")


def by_row_tiles[T](fn: Callable[..., T], *rows: jax.Array) -> T:
    """Apply fn to tiles of ROW_TILE rows, one after another; fn maps [16, ...] arrays to [16, ...] arrays.

    Raises ValueError unless the row count is a multiple of ROW_TILE: callers pad, so that no tile is special.
    """
    n = rows[0].shape[0]
    check_tiles(n)
    tiles = tuple(r.reshape(n // ROW_TILE, ROW_TILE, *r.shape[1:]) for r in rows)
    out = jax.lax.map(lambda t: fn(*t), tiles)
    return jax.tree.map(lambda o: o.reshape(n, *o.shape[2:]), out)
