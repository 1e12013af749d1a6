"""Gate of the feed-forward activation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from isojax.gates.case import Case, ill_conditioned, many
from isojax.pallas_kernels.mlp import reference, swiglu

COLUMNS = 1536  # SmolLM2's


def _altered(gate_up):
    """Above the boundary silu(gate) is rounded before it meets `up`."""
    gate, up = reference.halves(gate_up)
    silu = gate * reference.sigmoid(gate)
    if many(gate_up):
        silu = silu.astype(gate_up.dtype).astype(jnp.float32)
    return (silu * up).astype(gate_up.dtype)


def exact(gate_up):
    gate, up = np.split(gate_up.astype(np.float64), 2, 1)
    return gate / (1.0 + np.exp(-gate)) * up


@swiglu.gate_cases
def cases(rng, rows):
    return Case("silu times up", (ill_conditioned(rng, rows, 2 * COLUMNS),), altered=_altered, exact=exact)
