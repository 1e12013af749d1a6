"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.norms import add_rms, rms
from isojax.region import Call
from isojax.types import spec

_ROWS, _WEIGHT = spec("bf16", 64, 256), spec("bf16", 256)


@rms.canonical_calls
def _():
    return [Call((_ROWS, _WEIGHT), dict(eps=1e-6, zero_centered=z)) for z in (False, True)]


@add_rms.canonical_calls
def _():
    return [Call((_ROWS, _ROWS, _WEIGHT), dict(eps=1e-6, zero_centered=z)) for z in (False, True)]
