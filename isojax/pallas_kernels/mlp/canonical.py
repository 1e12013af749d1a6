"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.mlp import swiglu
from isojax.region import Call
from isojax.types import spec


@swiglu.canonical_calls
def _():
    return [Call((spec("bf16", 64, 1024),), {})]
