"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.head import logits, logprob, logprob_rows
from isojax.region import Call
from isojax.types import spec

_T, _D, _V = 64, 256, 2048
_HIDDEN, _WEIGHT, _INVERSE = spec("bf16", _T, _D), spec("bf16", _V, _D), spec("f32", _T)


@logits.canonical_calls
def _():
    return [Call((_HIDDEN, _WEIGHT), {})]


@logprob_rows.canonical_calls
def _():
    return [Call((spec("f32", _T, _V), _INVERSE), {})]


@logprob.canonical_calls
def _():
    return [Call((_HIDDEN, _WEIGHT, spec("i32", _T), _INVERSE), {})]
