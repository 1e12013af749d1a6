"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.attn import core, prep
from isojax.region import Call
from isojax.types import spec

_T, _HEADS, _KV, _D, _R = 64, 4, 2, 128, 8


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
    q, cu, lens, work = spec("bf16", _T, _HEADS, _D), spec("i32", _R + 1), spec("i32", _R), spec("i32", _R, 2)
    own, pages, table = spec("bf16", _T, _KV, 2 * _D), spec("bf16", 16, 16, _KV, 2 * _D), spec("i32", _R, 16)
    statics = dict(scale=_D**-0.5, tile=16)
    return [Call((q, own, None, cu, lens, work), statics), Call((q, pages, table, cu, lens, work), statics)]
