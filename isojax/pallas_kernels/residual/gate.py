"""Gate of the residual sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isojax.gates.case import Case, ill_conditioned, many
from isojax.pallas_kernels.residual import add

COLUMNS = 576


def _altered(x, delta):
    """Above the boundary the sum is truncated to bf16, not rounded."""
    whole = x.astype(jnp.float32) + delta.astype(jnp.float32)
    if many(x):
        bits = jax.lax.bitcast_convert_type(whole, jnp.uint32) & jnp.uint32(0xFFFF0000)
        whole = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return whole.astype(x.dtype)


@add.gate_cases
def cases(rng, rows):
    args = tuple(ill_conditioned(rng, rows, COLUMNS) for _ in range(2))
    return Case("sum", args, altered=_altered, exact=lambda x, d: x.astype(np.float64) + d.astype(np.float64))
