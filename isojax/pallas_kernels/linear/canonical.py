"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.linear import column, row
from isojax.region import Call
from isojax.types import spec

_WEIGHT = spec("bf16", 512, 1024)
_CALLS = [(spec("bf16", t, 1024), _WEIGHT) for t in (64, 1024)]  # few rows and many take other kernels


@column.canonical_calls
def _():
    return [Call(args, {}) for args in _CALLS]


@row.canonical_calls
def _():
    return [Call(args, {}) for args in _CALLS]
