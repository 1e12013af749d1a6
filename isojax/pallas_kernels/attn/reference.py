"""Reference schedule of the attention regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.errors import Unsupported
from isojax.pallas_kernels.norms.reference import normalise, sum_rows
from isojax.schedule import KV_PARTITION, KV_TILE, LOG2E, max_halves, sum_halves

f32 = jnp.float32
MASKED = -1e30  # start of a running maximum: finite, so that a row with no key yet stays NaN-free


# -- prep --------------------------------------------------------------------------------------------------------------
def _split(qkv, kv_heads, head_dim):
    t, width = qkv.shape
    group = width // (kv_heads * head_dim) - 2
    return qkv.reshape(t, kv_heads, group + 2, head_dim), group


def _rotate(x, cos, sin):
    """x [T, H, n, D] fp32; cos, sin [T, D/2]."""
    half = x.shape[-1] // 2
    c, s = cos[:, None, None], sin[:, None, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * c - b * s, b * c + a * s], -1)


def _prep32(qkv, bias, q_norm, k_norm, rope, positions, kv_heads, head_dim, eps, zero_centered):
    x, group = _split(qkv.astype(f32), kv_heads, head_dim)
    if bias is not None:
        x = x + _split(bias.astype(f32)[None], kv_heads, head_dim)[0]
    q, k, v = x[:, :, :group], x[:, :, group : group + 1], x[:, :, group + 1]
    if q_norm is not None:
        q, _ = normalise(q, q_norm, eps, zero_centered)
    if k_norm is not None:
        k, _ = normalise(k, k_norm, eps, zero_centered)
    angles = rope.at[positions].get(mode="promise_in_bounds", wrap_negative_indices=False)
    cos, sin = angles[:, : head_dim // 2], angles[:, head_dim // 2 :]
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)[:, :, 0]
    return q.reshape(q.shape[0], -1, head_dim), jnp.concatenate([k, v], -1)


def whole_heads(region, qkv, kv_heads, head_dim):
    """Raise Unsupported unless the columns of qkv are as many query heads for each KV head, its key and its value."""
    heads, rest = divmod(qkv.shape[1], kv_heads * head_dim)
    if rest or heads < 3:
        raise Unsupported(
            region,
            f"{qkv.shape[1]} columns with {kv_heads} KV heads of {head_dim}",
            f"a multiple of {kv_heads * head_dim}, at least three times it",
            "give each KV head's query heads, its key, its value",
        )


def prep_supports(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    whole_heads("attn.prep", qkv, kv_heads, head_dim)
    for name, a in (("q_norm", q_norm), ("k_norm", k_norm), ("rope", rope)):
        if a is not None and a.shape[-1] != head_dim:
            raise Unsupported("attn.prep", f"{name} of {a.shape}", f"{head_dim} columns", "give one for each of a head")


def prep(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    q, kv = _prep32(qkv, bias, q_norm, k_norm, rope, positions, kv_heads, head_dim, eps, zero_centered)
    return q.astype(qkv.dtype), kv.astype(qkv.dtype)


def prep_bwd(qkv, bias, q_norm, k_norm, rope, positions, dq, dkv, *, kv_heads, head_dim, eps, zero_centered):
    present = [p for p in (bias, q_norm, k_norm) if p is not None]

    def token(x, position, *params):
        it = iter(params)
        b, qn, kn = (next(it) if p is not None else None for p in (bias, q_norm, k_norm))
        q, kv = _prep32(x[None], b, qn, kn, rope, position[None], kv_heads, head_dim, eps, zero_centered)
        return q[0], kv[0]

    def f(x, *params):
        return jax.vmap(token)(x, positions, *params)

    each = [jnp.broadcast_to(p.astype(f32), (len(qkv), *p.shape)) for p in present]
    _, pull = jax.vjp(f, qkv.astype(f32), *each)
    dx, *dparams = pull((dq.astype(f32), dkv.astype(f32)))
    return dx.astype(qkv.dtype), *map(sum_rows, dparams)


# -- core --------------------------------------------------------------------------------------------------------------
def core_supports(q, kv, table, cu_q, lens, work, *, scale, tile):
    heads, kv_heads, d = q.shape[1], kv.shape[-2], q.shape[2]
    if heads % kv_heads or kv.shape[-1] != 2 * d or (kv.ndim != 4 if table is not None else kv.ndim != 3):
        raise Unsupported(
            "attn.core",
            f"q {q.shape} with kv {kv.shape}",
            "kv [T, Hkv, 2 D], or pages [N, B, Hkv, 2 D] with a table; Hkv divides Hq",
            "pack each token's key and value along the last axis",
        )
    if table is not None and KV_TILE % kv.shape[1] and kv.shape[1] % KV_TILE:
        raise Unsupported(
            "attn.core", f"pages of {kv.shape[1]} tokens", f"a divisor or multiple of {KV_TILE}", "change block_size"
        )


def core(q, kv, table, cu_q, lens, work, *, scale, tile):
    t, heads, d = q.shape
    kv_heads = kv.shape[-2]
    group = heads // kv_heads
    slots = kv.reshape(-1, kv_heads, 2 * d)
    page = kv.shape[1] if table is not None else 0

    def keys(request, first):
        """Rows of KV_TILE keys from position `first` on, [KV_TILE, Hkv, 2 D]; keys past the end read as zero."""
        at = first + jnp.arange(KV_TILE, dtype=jnp.int32)
        inside = at < lens[request]
        at = jnp.where(inside, at, 0)
        slot = cu_q[request] + at if table is None else table[request, at // page] * page + at % page
        tile_kv = slots.at[slot].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return jnp.where(inside[:, None, None], tile_kv, 0)

    def one(item):
        request, first = jnp.maximum(item[0], 0), item[1]
        row = first + jnp.arange(tile, dtype=jnp.int32)
        count = cu_q[request + 1] - cu_q[request]
        valid = (row < count) & (item[0] >= 0)
        position = jnp.where(valid, lens[request] - count + row, -1)  # a row sees the keys up to its own position
        at = jnp.where(valid, cu_q[request] + row, t)
        rows = q.at[jnp.minimum(at, t - 1)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        rows = jnp.where(valid[:, None, None], rows, 0)
        # grouped heads share a KV head: [Hkv, tile * group, D]
        a = rows.reshape(tile, kv_heads, group, d).swapaxes(0, 1).reshape(kv_heads, tile * group, d)
        limit = jnp.repeat(position, group)[None, :, None]
        end = jnp.max(position) + 1

        def step(j, state):
            m, den, acc = state
            tile_kv = keys(request, j * KV_TILE).swapaxes(0, 1)
            k, v = tile_kv[..., :d], tile_kv[..., d:]
            s = jax.lax.dot_general(a, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=f32)
            s = jax.lax.optimization_barrier(s * (scale * LOG2E))
            s = jnp.where(j * KV_TILE + jnp.arange(KV_TILE, dtype=jnp.int32) <= limit, s, -jnp.inf)
            top = jnp.maximum(m, max_halves(s))
            alpha, p = jnp.exp2(m - top), jnp.exp2(s - top[..., None])
            den = den * alpha + sum_halves(p)
            pv = jax.lax.dot_general(p.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=f32)
            return top, den, acc * alpha[..., None] + pv

        shape = (kv_heads, tile * group)
        fresh = (jnp.full(shape, MASKED, f32), jnp.zeros(shape, f32), jnp.zeros((*shape, d), f32))

        def partition(p, total):
            first_tile = p * (KV_PARTITION // KV_TILE)
            last_tile = jnp.minimum(first_tile + KV_PARTITION // KV_TILE, -(-end // KV_TILE))
            m, den, acc = jax.lax.fori_loop(first_tile, last_tile, step, fresh)
            big_m, big_den, big_acc = total
            top = jnp.maximum(big_m, m)
            old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
            return top, big_den * old + den * new, big_acc * old[..., None] + acc * new[..., None]

        m, den, acc = jax.lax.fori_loop(0, -(-end // KV_PARTITION), partition, fresh)
        inverse = jnp.where(den > 0, 1.0 / den, 0.0)
        out = (acc * inverse[..., None]).astype(q.dtype)
        lse = m + jnp.log2(jnp.where(den > 0, den, 1.0))
        out = out.reshape(kv_heads, tile, group, d).swapaxes(0, 1).reshape(tile, heads * d)
        return at, out, lse.reshape(kv_heads, tile, group).swapaxes(0, 1).reshape(tile, heads)

    at, out, lse = jax.lax.map(one, work)
    at = at.reshape(-1)
    o = jnp.zeros((t, heads * d), q.dtype).at[at].set(out.reshape(-1, heads * d), mode="drop")
    return o, jnp.zeros((t, heads), f32).at[at].set(lse.reshape(-1, heads), mode="drop")
