"""Reference schedule of the feed-forward activations."""

from __future__ import annotations

import jax.numpy as jnp

from isojax.errors import Unsupported
from isojax.schedule import LOG2E

f32 = jnp.float32


def sigmoid(x):
    return 1.0 / (1.0 + jnp.exp2(x * -LOG2E))


def halves(gate_up):
    f = gate_up.shape[1] // 2
    return gate_up[:, :f].astype(f32), gate_up[:, f:].astype(f32)


def swiglu_supports(gate_up):
    width = gate_up.shape[1]
    if width % 2:
        raise Unsupported(
            "mlp.swiglu", f"{width} columns", "an even number", "put gate and up, equally wide, in one array"
        )


def swiglu(gate_up):
    gate, up = halves(gate_up)
    return (gate * sigmoid(gate) * up).astype(gate_up.dtype)


def swiglu_bwd(gate_up, ct):
    gate, up = halves(gate_up)
    c, s = ct.astype(f32), sigmoid(gate)
    d_gate = c * up * s * (1.0 + gate * (1.0 - s))
    return jnp.concatenate([d_gate, c * gate * s], 1).astype(gate_up.dtype)
