"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.linear import column, row
from isojax.region import Call
from isojax.types import spec

_CALL = (spec("bf16", 64, 1024), spec("bf16", 512, 1024))


@column.canonical_calls
def _():
    return [Call(_CALL, {})]


@row.canonical_calls
def _():
    return [Call(_CALL, {})]
