"""Reference schedule of attn.core_bwd: tiles of 64 rows, counted from each request's start."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.schedule import LOG2E, sum_halves

CHAIN_HEADS = 4  # query heads that one chain of a key's gradient runs over; chains are added in ascending order
TILE = 64
f32 = jnp.float32


def core_bwd(q, kv, cu_q, out, lse, ct, *, scale):
    t, heads, d = q.shape
    kv_heads = kv.shape[1]
    group = heads // kv_heads
    grouped = lambda x: x.reshape(t, kv_heads, group, -1)
    q, out, lse, ct = grouped(q), grouped(out), grouped(lse), grouped(ct)

    def dot(a, b, contract):
        """Of each KV head: a, b [Hkv, 64, n]."""
        return jax.lax.dot_general(a, b, (contract, ((0,), (0,))), preferred_element_type=f32)

    def request(r, grads):
        start, count = cu_q[r], cu_q[r + 1] - cu_q[r]
        tiles = -(-count // TILE)

        def at(i):
            """Rows of tile i in T, t for those past the request's end."""
            row = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
            return jnp.where(row < count, start + row, t)

        def rows(x, i, *head):
            """Tile i of x, heads first; rows past the end are zero."""
            where = at(i)
            value = x.at[(jnp.minimum(where, t - 1), slice(None), *head)].get(mode="promise_in_bounds")
            return jnp.where((where < t)[:, None, None], value, 0).swapaxes(0, 1)

        def slopes(g, i, j):
            """p and ds [Hkv, 64 rows, 64 keys] of query head g of each group, tile i against key tile j."""
            own, c, keys = rows(q, i, g), rows(ct, i, g), rows(kv, j)
            k, v = keys[..., :d], keys[..., d:]
            delta = sum_halves(c.astype(f32) * rows(out, i, g).astype(f32))[..., None]
            s = dot(own, k, ((2,), (2,))) * (scale * LOG2E)
            index = jnp.arange(TILE, dtype=jnp.int32)
            row, key = i * TILE + index[:, None], j * TILE + index
            p = jnp.where((key <= row) & (row < count), jnp.exp2(s - rows(lse, i, g)), 0.0)
            return p, p * (dot(c, v, ((2,), (2,))) - delta), own, c, k

        def queries(i, dq):
            def each(g, dq):
                def step(j, acc):
                    _, ds, _, _, k = slopes(g, i, j)
                    return acc + dot(ds.astype(k.dtype), k, ((2,), (1,)))

                acc = jax.lax.fori_loop(0, i + 1, step, jnp.zeros((kv_heads, TILE, d), f32))
                return dq.at[at(i), :, g].set((acc * scale).astype(dq.dtype).swapaxes(0, 1), mode="drop")

            return jax.lax.fori_loop(0, group, each, dq)

        def keys(j, dkv):
            total = None
            for first in range(0, group, CHAIN_HEADS):

                def each(g, accs):
                    def step(i, accs):
                        p, ds, own, c, _ = slopes(g, i, j)
                        dk, dv = accs
                        dk = dk + dot(ds.astype(own.dtype), own, ((1,), (1,)))
                        return dk, dv + dot(p.astype(c.dtype), c, ((1,), (1,)))

                    return jax.lax.fori_loop(j, tiles, step, accs)

                zero = jnp.zeros((kv_heads, TILE, d), f32)
                dk, dv = jax.lax.fori_loop(first, min(first + CHAIN_HEADS, group), each, (zero, zero))
                chain = jnp.concatenate([dk * scale, dv], -1)
                total = chain if total is None else total + chain
            assert total is not None
            return dkv.at[at(j)].set(total.astype(dkv.dtype).swapaxes(0, 1), mode="drop")

        dq, dkv = grads
        return jax.lax.fori_loop(0, tiles, queries, dq), jax.lax.fori_loop(0, tiles, keys, dkv)

    zeros = jnp.zeros((t, kv_heads, group, d), q.dtype), jnp.zeros(kv.shape, kv.dtype)
    dq, dkv = jax.lax.fori_loop(0, cu_q.shape[0] - 1, request, zeros)
    return dq.reshape(t, heads, d), dkv
