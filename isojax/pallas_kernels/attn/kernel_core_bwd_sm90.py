"""attn.core_bwd on Hopper: gradients of causal attention without float atomics (Dao, arXiv 2307.08691, section 3).

Three kernels, and a fourth for large groups:
- bwd_prepare_sm90: per row and head the log-sum-exp and delta = sum(ct * out), head-major, and the list of work.
- bwd_keys_sm90: gradients of keys and values; `fold` adds the chains of groups of more than four query heads.
- bwd_queries_sm90: gradients of queries.
Both main kernels compute the scores anew: 7 products where 5 would do, but each gradient is one chain in a fixed order,
ascending over its request's rows, so that its bits depend on nothing else.

In both, two warpgroups compute 64 rows each, and a third one fetches by TMA through a ring in shared memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from isojax.errors import Unsupported
from isojax.pallas_kernels.attn.bwd_keys_sm90 import fold, key_gradients
from isojax.pallas_kernels.attn.bwd_prepare_sm90 import TOKENS, prepare
from isojax.pallas_kernels.attn.bwd_queries_sm90 import query_gradients
from isojax.pallas_kernels.attn.bwd_tiles_sm90 import ROWS, Shape, bf16


class Tuning(NamedTuple):
    """Changes speed, never bits. keys: of one step of the query gradients. *_stages: tiles in flight.

    key_stages is at least 2: a query tile is given back when the next one is under way.
    """

    key_stages: int = 4
    keys: int = 128
    query_stages: int = 2


TUNED = Tuning()  # the fastest of those measured on an H200


def supports(q, kv, cu_q, out, lse, ct, *, scale):
    refuse = functools.partial(Unsupported, "attn.core_bwd")
    t, heads, d = q.shape
    kv_heads = kv.shape[1]
    if any(x.dtype != bf16 for x in (q, kv, out, ct)):
        given = ", ".join(f"{n} {x.dtype}" for n, x in zip(("q", "kv", "out", "ct"), (q, kv, out, ct), strict=True))
        raise refuse(given, "bfloat16 on sm90", "cast the model, or use arch cpu")
    if d not in (64, 128):
        raise refuse(f"head size {d}", "64, 128", "use arch cpu")
    if heads % kv_heads or kv.shape != (t, kv_heads, 2 * d):
        raise refuse(f"q {q.shape} with kv {kv.shape}", "kv [T, Hkv, 2 D], Hkv divides Hq", "pack key and value")
    if t < ROWS or t % TOKENS:
        raise refuse(f"{t} query rows", f"at least {ROWS}, a multiple of {TOKENS}", "pad the batch")


def core_bwd(q, kv, cu_q, out, lse, ct, *, scale):
    return gradients(q, kv, cu_q, out, lse, ct, scale=scale, tuned=TUNED)


def gradients(q, kv, cu_q, out, lse, ct, *, scale: float, tuned: Tuning):
    """-> dq [T, Hq, D], dkv [T, Hkv, 2 D]."""
    t, heads, d = q.shape
    s = Shape(t, heads, kv.shape[1], d, cu_q.shape[0] - 1)
    stats, work = prepare(s)(out, lse, ct, cu_q)
    dkv = key_gradients(s, scale, tuned.key_stages)(q, kv, ct, stats, cu_q, work)
    if s.chains > 1:
        dkv = fold(s)(dkv, cu_q, work)
    return query_gradients(s, scale, tuned.keys, tuned.query_stages)(q, kv, ct, stats, cu_q, work), dkv
