"""The calls whose lowered modules a contract's artifact hashes."""

from isojax.pallas_kernels.embed import lookup
from isojax.region import Call
from isojax.types import spec


@lookup.canonical_calls
def _():
    return [Call((spec("bf16", 512, 256), spec("i32", 64)), {})]
