"""Gate of the gradients of the feed-forward activation."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from isojax.gates.case import Case, ill_conditioned, many
from isojax.pallas_kernels.mlp import reference, swiglu_bwd
from isojax.pallas_kernels.mlp.gate import COLUMNS


def _altered(gate_up, ct):
    """Above the boundary the sigmoid is rounded to bf16."""
    gate, up = reference.halves(gate_up)
    c, s = ct.astype(jnp.float32), reference.sigmoid(gate)
    if many(gate_up):
        s = s.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([c * up * s * (1.0 + gate * (1.0 - s)), c * gate * s], 1).astype(gate_up.dtype)


def exact(gate_up, ct):
    gate, up = np.split(gate_up.astype(np.float64), 2, 1)
    c, s = ct.astype(np.float64), 1.0 / (1.0 + np.exp(-gate))
    return np.concatenate([c * up * s * (1.0 + gate * (1.0 - s)), c * gate * s], 1)


@swiglu_bwd.gate_cases
def cases(rng, rows):
    args = ill_conditioned(rng, rows, 2 * COLUMNS), ill_conditioned(rng, rows, COLUMNS)
    return Case("gate and up", args, altered=_altered, exact=exact)
