"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.attn import core, prep
from isojax.region import Call
from isojax.types import spec

_T, _HEADS, _KV, _D, _R = 64, 4, 2, 128, 8  # D = 64 is hashed too


@prep.canonical_calls
def _():
    width = (_HEADS + 2 * _KV) * _D
    qkv, rope, positions = spec("bf16", _T, width), spec("f32", 128, _D), spec("i32", _T)
    statics = dict(kv_heads=_KV, head_dim=_D, eps=1e-6)
    bias, norm = spec("bf16", width), spec("bf16", _D)
    return [
        Call((qkv, None, None, None, rope, positions), dict(statics, eps=0.0)),
        Call((qkv, bias, None, None, rope, positions), dict(statics, eps=0.0)),
        Call((qkv, None, norm, norm, rope, positions), statics),
    ]


@core.canonical_calls
def _():
    cu, lens, work = spec("i32", _R + 1), spec("i32", _R), spec("i32", _R, 2)
    table = spec("i32", _R, 128)  # 2,048 tokens of 16: two partitions, so that decoding splits them
    calls = []
    for d in (64, _D):
        q, own, pages = spec("bf16", _T, _HEADS, d), spec("bf16", _T, _KV, 2 * d), spec("bf16", 16, 16, _KV, 2 * d)
        whole, decode = dict(scale=d**-0.5, tile=16), dict(scale=d**-0.5, tile=1)
        calls.append(Call((q, own, None, cu, lens, work), whole))
        calls += [Call((q, pages, table, cu, lens, work), statics) for statics in (whole, decode)]
    return calls
