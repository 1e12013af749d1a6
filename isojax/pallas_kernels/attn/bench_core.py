"""Bench of attn.core: causal batches of equal sequences, and paged decode.

Peer: vLLM's FlashAttention 3 where it can be imported, else torch's scaled_dot_product_attention (which cannot read
pages: it gets contiguous keys, prepared outside the timing).
"""

from __future__ import annotations

import importlib.util

import numpy as np

from isojax import doctor
from isojax.gates.bench import BenchCase, Operand, Peer
from isojax.gates.shapes import CONTEXTS, decodes, distinct, padded
from isojax.pallas_kernels.attn import core
from isojax.pallas_kernels.attn.work import capacity, tile_rows, work_list

PREFILL_TOKENS = 16384
PAGE = 16


def _flash():
    """vLLM's flash_attn_varlen_func, or None where vLLM is not installed. One that does not import is an error."""
    if importlib.util.find_spec("vllm") is None or doctor.version("vllm") is None:
        return None
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func


def _sdpa(torch, q, k, v, scale, causal):
    """q, k, v [B, n, H, D]."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    run = lambda: attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)
    return Peer("torch SDPA", run)


def _prefill_peer(length: int, scale: float):
    def peer(torch, q, kv, _table, cu_q, lens, work):
        k, v = (x.contiguous() for x in kv.chunk(2, -1))
        if (flash := _flash()) is None:
            batch = lambda x: x.unflatten(0, (-1, length))
            return _sdpa(torch, batch(q), batch(k), batch(v), scale, True)
        run = lambda: flash(
            q, k, v, max_seqlen_q=length, cu_seqlens_q=cu_q, max_seqlen_k=length, cu_seqlens_k=cu_q,
            softmax_scale=scale, causal=True, fa_version=3,
        )  # fmt: skip
        return Peer("FlashAttention 3", run)

    return peer


def _decode_peer(requests: int, length: int, scale: float):
    def peer(torch, q, kv, table, cu_q, lens, work):
        q, table, cu_q, lens = q[:requests], table[:requests], cu_q[: requests + 1], lens[:requests]
        k, v = kv.chunk(2, -1)
        if (flash := _flash()) is None:
            rows = lambda x: x[table.long()].flatten(1, 2)
            found = _sdpa(torch, q[:, None], rows(k), rows(v), scale, False)
            return Peer(found.name, lambda: found().flatten(1))

        def run():
            out = flash(
                q, k, v, max_seqlen_q=1, cu_seqlens_q=cu_q, max_seqlen_k=length, seqused_k=lens, block_table=table,
                softmax_scale=scale, causal=True, fa_version=3,
            )  # fmt: skip
            assert not isinstance(out, tuple)  # one where its log-sum-exp is asked for
            return out.flatten(1)

        return Peer("FlashAttention 3", run)

    return peer


def _lists(requests: int, rows: int, length: int, tile: int, room: int = 0) -> tuple[Operand, Operand, Operand]:
    """cu_q, lens and work of `requests` requests with `rows` query rows and `length` keys each; `room`: for more."""
    counts = np.full(requests, rows)
    if room:
        counts = np.pad(counts, (0, room - requests))
    cu_q = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    work = work_list(counts, tile, capacity(max(room, requests * rows), len(counts), tile))
    lens = np.where(counts, length, 0).astype(np.int32)
    return tuple(Operand("i32", a.shape, values=a) for a in (cu_q, lens, work))  # pyright: ignore[reportReturnType]


def _prefill(m, length):
    heads, kv_heads, d = m.heads, m.kv_heads, m.head_dim
    t = max(PREFILL_TOKENS, length)
    tile, scale = tile_rows("sm90", heads // kv_heads), d**-0.5
    return BenchCase(
        f"{m.name} causal {t // length} x {length}",
        (Operand("bf16", (t, heads, d)), Operand("bf16", (t, kv_heads, 2 * d)), None)
        + _lists(t // length, length, length, tile),
        bytes=2 * t * d * (2 * heads + 2 * kv_heads) + 4 * t * heads,
        flops=2 * t * length * heads * d,  # two matmuls, two flops, half of the square
        statics={"scale": scale, "tile": tile},
        peer=_prefill_peer(length, scale),
        model=m.name,
        at={"length": length},
    )


def _decode(m, requests, length):
    """Padded to whole blocks of 64 rows, as an engine's batch is; the peer gets the true requests."""
    heads, kv_heads, d = m.heads, m.kv_heads, m.head_dim
    pages, scale, rows = length // PAGE, d**-0.5, padded(requests)
    table = np.random.default_rng(0).permutation(requests * pages).reshape(requests, pages).astype(np.int32)
    table = np.pad(table, ((0, rows - requests), (0, 0)))
    tile = tile_rows("sm90", heads // kv_heads, longest=1)
    return BenchCase(
        f"{m.name} decode {requests} x {length}",
        (
            Operand("bf16", (rows, heads, d)),
            Operand("bf16", (requests * pages, PAGE, kv_heads, 2 * d)),
            Operand("i32", table.shape, values=table),
            *_lists(requests, 1, length, tile, rows),
        ),
        bytes=2 * requests * (length * kv_heads * 2 * d + 2 * heads * d),
        flops=4 * requests * length * heads * d,
        statics={"scale": scale, "tile": tile},
        peer=_decode_peer(requests, length, scale),
        model=m.name,
        at={"sequences": requests, "context": length},
    )


@core.bench_cases
def cases():
    models = distinct("heads", "kv_heads", "head_dim")
    causal = [_prefill(m, length) for m in models for length in CONTEXTS]
    return causal + [_decode(m, *shape) for m in models for shape in decodes()]
