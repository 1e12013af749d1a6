"""Reference schedule of the linear regions: 16-row tiles, so that a row's bits do not depend on the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.errors import Unsupported
from isojax.schedule import LEAF_QUANTUM, ROW_TILE, by_row_tiles, padded, tree

f32 = jnp.float32


def dot_t(a, b):
    """a [m, k] @ b.T, b [n, k], fp32 out: one chain over k."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=f32)


def column(x, weight):
    return by_row_tiles(lambda t: dot_t(t, weight).astype(x.dtype), x)


def row_supports(x, weight, *, leaves):
    k = x.shape[1]
    if k % leaves:
        raise Unsupported(
            "linear.row",
            f"K = {k} with {leaves} leaves",
            f"K divisible by {leaves}",
            "choose a leaf count that divides K and is at least the largest tensor-parallel degree claimed",
        )


def leaf_slices(x, leaves):
    """[m, K] -> [leaves, m, width], zero-padded to a multiple of LEAF_QUANTUM (exact: zeros end the chain)."""
    m, k = x.shape
    width = k // leaves
    parts = jnp.swapaxes(x.reshape(m, leaves, width), 0, 1)
    return jnp.pad(parts, ((0, 0), (0, 0), (0, padded(width, LEAF_QUANTUM) - width)))


def row(x, weight, *, leaves):
    w = leaf_slices(weight, leaves)

    def tile(t):
        a = leaf_slices(t, leaves)
        return tree([dot_t(a[i], w[i]) for i in range(leaves)], jnp.add).astype(x.dtype)

    return by_row_tiles(tile, x)


def dgrad(ct, weight):
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(ct, weight, dims, preferred_element_type=f32).astype(ct.dtype)


def wgrad(ct, x, into):
    """By tiles of tokens, so that tokens of zeros at the end change nothing."""
    tiles = [a.reshape(-1, ROW_TILE, a.shape[1]) for a in (ct, x)]
    dims = (((0,), (0,)), ((), ()))
    add = lambda total, t: (total + jax.lax.dot_general(t[0], t[1], dims, preferred_element_type=f32), None)
    total = jax.lax.scan(add, jnp.zeros((ct.shape[1], x.shape[1]), f32), tuple(tiles))[0]
    return total if into is None else into + total
