"""Reference schedule of the head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.pallas_kernels.linear.reference import dot_t
from isojax.schedule import (
    LEAVES,
    LN2,
    LOG2E,
    VOCAB_TILE,
    by_row_tiles,
    max_halves,
    padded,
    sum_halves,
    tree,
    vocab_leaves,
)

f32 = jnp.float32
MASKED = -1e30


def logits(hidden, weight):
    return by_row_tiles(lambda t: dot_t(t, weight), hidden)


def _combine(a, b):
    """Two (max, sum of exp) pairs into one; a is the lower part of the vocabulary."""
    top = jnp.maximum(a[0], b[0])
    return top, a[1] * jnp.exp2((a[0] - top) * LOG2E) + b[1] * jnp.exp2((b[0] - top) * LOG2E)


def log_sum_exp(z):
    """z [m, V] fp32, already scaled -> natural log-sum-exp [m], in the pinned order."""
    parts = []
    width = vocab_leaves(z.shape[1])[0][1]
    for start, stop in vocab_leaves(z.shape[1]):
        leaf = z[:, start:stop]
        leaf = jnp.pad(leaf, ((0, 0), (0, padded(width, VOCAB_TILE) - leaf.shape[1])), constant_values=-jnp.inf)
        parts.append(leaf.reshape(z.shape[0], -1, VOCAB_TILE))
    tiles = jnp.stack(parts, 1)  # [m, leaves, tiles, VOCAB_TILE]
    top = jnp.maximum(max_halves(tiles), MASKED)
    total = sum_halves(jnp.exp2((tiles - top[..., None]) * LOG2E))
    start = (jnp.full(top.shape[:2], MASKED, f32), jnp.zeros(top.shape[:2], f32))
    (top, total), _ = jax.lax.scan(
        lambda c, x: (_combine(c, x), None), start, (jnp.moveaxis(top, 2, 0), jnp.moveaxis(total, 2, 0))
    )
    top, total = tree([(top[:, i], total[:, i]) for i in range(LEAVES)], _combine)
    return top + jnp.log2(total) * LN2


def _scaled(z, inv_temperature):
    # fenced: without it XLA contracts this multiply with a later subtraction, in one region and not in the other
    return jax.lax.optimization_barrier(z * inv_temperature[:, None])


def logprob_rows(logits, inv_temperature):
    def tile(z, inv):
        z = _scaled(z, inv)
        lse = log_sum_exp(z)
        return z - lse[:, None], lse

    return by_row_tiles(tile, logits, inv_temperature)


def logprob(hidden, weight, targets, inv_temperature, *, emit_logits):
    def tile(h, target, inv):
        raw = dot_t(h, weight)
        z = _scaled(raw, inv)
        lse = log_sum_exp(z)
        picked = jnp.take_along_axis(z, target[:, None], 1, mode="promise_in_bounds")[:, 0]
        out = (picked - lse, lse)
        return (*out, raw) if emit_logits else out

    return by_row_tiles(tile, hidden, targets, inv_temperature)


def logprob_bwd(hidden, weight, targets, inv_temperature, lse, ct):
    """d logprob / d z = onehot - softmax, tile by tile so that [T, V] is never held."""
    rows = 64 if hidden.shape[0] % 64 == 0 else 16
    n, d = hidden.shape
    shape = lambda x: x.reshape(n // rows, rows, *x.shape[1:])

    def step(dw, x):
        h, target, inv, row_lse, c = x
        z = dot_t(h, weight) * inv[:, None]
        p = jnp.exp2((z - row_lse[:, None]) * LOG2E)
        onehot = target[:, None] == jnp.arange(weight.shape[0], dtype=jnp.int32)
        dz = (onehot.astype(f32) - p) * (c * inv)[:, None]
        dims = (((1,), (0,)), ((), ()))
        dh = jax.lax.dot_general(dz, weight.astype(f32), dims).astype(h.dtype)
        return dw + jax.lax.dot_general(dz, h.astype(f32), (((0,), (0,)), ((), ()))), dh

    xs = tuple(map(shape, (hidden, targets, inv_temperature, lse, ct)))
    dw, dh = jax.lax.scan(step, jnp.zeros((weight.shape[0], d), f32), xs)
    return dh.reshape(n, d), dw
