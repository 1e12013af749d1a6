"""Reference schedule of the head."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.pallas_kernels.linear.reference import dot_t, wgrad
from isojax.schedule import (
    LEAVES,
    LN2,
    LOG2E,
    ROW_TILE,
    VOCAB_TILE,
    by_row_tiles,
    max_halves,
    padded,
    sum_halves,
    tree,
    vocab_leaves,
)

f32 = jnp.float32
MASKED = -1e30  # least maximum of a tile, so that a fully masked one counts for nothing
VOCAB_CHUNK = 16384  # columns whose logits the backward holds at a time, at most


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


def chunk_width(vocab, most):
    """Columns of one chunk of the backward: as few chunks of at most `most` columns as can be, all of one width, a
    multiple of VOCAB_TILE. The last one may reach past the end."""
    chunks = -(-vocab // most)
    return padded(-(-vocab // chunks), VOCAB_TILE)


def _whole_tiles(rows):
    return jnp.pad(rows, ((0, -len(rows) % ROW_TILE), (0, 0)))


def logprob_bwd(hidden, weight, targets, inv_temperature, lse, ct, into, *, vocab_chunk):
    """d logprob / d z = onehot - softmax, by chunks of the vocabulary, so that [T, V] is never held."""
    (vocab, d), width = weight.shape, chunk_width(weight.shape[0], vocab_chunk)
    chunks = -(-vocab // width)
    cut = jnp.pad(weight, ((0, chunks * width - vocab), (0, 0))).reshape(chunks, width, d)

    def step(dh, x):
        w, start = x

        def tile(h, target, inv, row_lse, c):
            p = jnp.exp2(dot_t(h, w) * (inv * LOG2E)[:, None] - (row_lse * LOG2E)[:, None])
            hit = target[:, None] == start + jnp.arange(width, dtype=jnp.int32)
            return (jnp.where(hit, 1 - p, -p) * (c * inv)[:, None]).astype(h.dtype)

        dz = by_row_tiles(tile, hidden, targets, inv_temperature, lse, ct)
        return dh + by_row_tiles(lambda t: dot_t(t, w.T), dz), wgrad(_whole_tiles(dz), _whole_tiles(hidden), None)

    starts = jnp.arange(chunks, dtype=jnp.int32) * width
    dh, dw = jax.lax.scan(step, jnp.zeros(hidden.shape, f32), (cut, starts))
    dw = dw.reshape(chunks * width, d)[:vocab]
    return dh.astype(hidden.dtype), dw if into is None else into + dw
