"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.residual import add
from isojax.region import Call
from isojax.types import spec


@add.canonical_calls
def _():
    return [Call((spec("bf16", 64, 256), spec("bf16", 64, 256)), {})]
