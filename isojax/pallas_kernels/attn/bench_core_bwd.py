"""Bench of attn.core_bwd: causal batches of equal sequences, against the backward of torch's flash attention alone."""

from __future__ import annotations

import functools

import numpy as np

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import CONTEXTS, Model, distinct
from isojax.pallas_kernels.attn import core_bwd

TOKENS = 16384  # of a batch, or one longer sequence
NARROW = Model("SmolLM2-135M", 576, 9, 3, 64, 1536, 49152)  # heads of 64


def _peer(length, torch, q, kv, _cu_q, _out, _lse, ct):
    """The forward and the layout that torch likes best are prepared; dq, dk and dv are timed."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    heads_first = lambda x: x.reshape(-1, length, *x.shape[1:]).transpose(1, 2).contiguous()
    q, k, v = (heads_first(x).requires_grad_() for x in (q, *kv.chunk(2, -1)))
    ct = heads_first(ct.view(len(ct), -1, q.shape[-1]))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return lambda: torch.autograd.grad(out, (q, k, v), ct, retain_graph=True)


def _case(model, length):
    t, heads, kv_heads, d = max(TOKENS, length), model.heads, model.kv_heads, model.head_dim
    cu_q = np.arange(0, t + 1, length, dtype=np.int32)
    # what rows of normal scores have, so that the probabilities are as small as they are in a model
    lse = np.log2(np.arange(t) % length + 1.0).astype(np.float32)[:, None] + np.zeros(heads, np.float32)
    return BenchCase(
        f"{model.name} causal {t // length} x {length}",
        (
            Operand("bf16", (t, heads, d)),
            Operand("bf16", (t, kv_heads, 2 * d)),
            Operand("i32", cu_q.shape, values=cu_q),
            Operand("bf16", (t, heads * d)),
            Operand("f32", (t, heads), values=lse),
            Operand("bf16", (t, heads * d)),
        ),
        bytes=2 * t * d * (4 * heads + 4 * kv_heads) + 4 * t * heads,
        flops=5 * t * length * heads * d,  # five products, two flops, half of the square
        statics={"scale": d**-0.5},
        peer=functools.partial(_peer, length),
        against="torch SDPA (flash), backward",
        model=model.name,
        part="backward",
        at={"length": length},
        comparable=False,  # out and lse are not those of q and kv
    )


@core_bwd.bench_cases
def cases():
    return [_case(m, length) for m in (*distinct("heads", "kv_heads", "head_dim"), NARROW) for length in CONTEXTS]
