"""Gradients of the attention regions."""

from __future__ import annotations

from isojax.errors import Unsupported
from isojax.region import Residuals, lookup


def prep(res: Residuals, cts, *, kv_heads, head_dim, eps, zero_centered):
    bias, q_norm, k_norm = res.args[1:4]
    statics = dict(kv_heads=kv_heads, head_dim=head_dim, eps=eps, zero_centered=zero_centered)
    grads = lookup("attn.prep_bwd").all_outputs(*res.args, *cts, **statics)
    it = iter(grads)
    dqkv = next(it)
    params = tuple(next(it) if p is not None else None for p in (bias, q_norm, k_norm))
    return (dqkv, *params, None, None)


def core(res: Residuals, ct, *, scale, tile):
    q, kv, table, cu_q, _, _ = res.args
    if table is not None:
        raise Unsupported("attn.core", "a gradient through paged keys", "table=None", "train on the batch's own keys")
    out, lse = res.outs
    dq, dkv = lookup("attn.core_bwd")(q, kv, cu_q, out, lse, ct, scale=scale)
    return dq, dkv, None, None, None, None
