"""Gates of the normalisation regions: rows, and the fused norm against its two parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isojax.gates.bits import compare_all
from isojax.gates.case import Case, Context, GateResult, ill_conditioned, many
from isojax.pallas_kernels.norms import add_rms, reference, rms
from isojax.region import lookup
from isojax.schedule import sum_halves

COLUMNS = 576  # SmolLM2's: no power of two, so that padding and overlap are in play
EPS = 1e-6


def _rms_altered(x, weight, *, eps, zero_centered):
    """Above the boundary neighbours are added first: another tree over the same terms."""
    v = x.astype(jnp.float32)
    square = v * v
    if many(x):
        square = square[:, ::2] + square[:, 1::2]
    rstd = jax.lax.rsqrt(sum_halves(square) * (1.0 / x.shape[1]) + eps)
    return (v * rstd[:, None] * reference.gamma(weight, zero_centered)).astype(x.dtype), rstd


def _add_rms_altered(x, delta, weight, *, eps, zero_centered):
    """Above the boundary the norm reads the sum before its rounding."""
    whole = x.astype(jnp.float32) + delta.astype(jnp.float32)
    h = whole.astype(x.dtype)
    y, rstd = reference.normalise(whole if many(x) else h.astype(jnp.float32), weight, eps, zero_centered)
    return h, y.astype(x.dtype), rstd


def exact_rms(x, weight, *, eps, zero_centered=False):
    x, gamma = x.astype(np.float64), weight.astype(np.float64) + (1.0 if zero_centered else 0.0)
    rstd = 1.0 / np.sqrt((x * x).mean(-1) + eps)
    return x * rstd[..., None] * gamma, rstd


def exact_add_rms(x, delta, weight, *, eps, zero_centered=False):
    h = (x.astype(np.float64) + delta.astype(np.float64)).astype(x.dtype)  # rounded: the region's contract
    return h.astype(np.float64), *exact_rms(h, weight, eps=eps, zero_centered=zero_centered)


@rms.gate_cases
def rms_cases(rng, rows):
    args = ill_conditioned(rng, rows, COLUMNS), ill_conditioned(rng, COLUMNS)
    return [
        Case(name, args, {"eps": EPS, "zero_centered": zero}, _rms_altered, exact_rms)
        for name, zero in (("plain", False), ("zero_centered", True))
    ]


@add_rms.gate_cases
def add_rms_cases(rng, rows):
    args = (*(ill_conditioned(rng, rows, COLUMNS) for _ in range(2)), ill_conditioned(rng, COLUMNS))
    statics = {"eps": EPS, "zero_centered": False}
    return [
        Case("plain", args, statics, _add_rms_altered, exact_add_rms),
        ("equals residual.add then norms.rms", fused_equals_parts),
    ]


def fused_equals_parts(context: Context) -> GateResult:
    """norms.add_rms has the bits of residual.add followed by norms.rms, so layers may be cut at the residual sum."""
    x, d = (ill_conditioned(context.rng, 64, COLUMNS) for _ in range(2))
    w, statics = ill_conditioned(context.rng, COLUMNS), {"eps": EPS, "zero_centered": False}
    fused = context.execute(add_rms, (x, d, w), statics)

    def parts(delta):
        (h,) = context.execute(lookup("residual.add"), (x, delta), {})
        return h, *context.execute(rms, (h, w), statics)

    diff = compare_all(fused, parts(d))
    # control: the same sums, but x is normalised before half of delta is added
    moved = compare_all(fused[1:], context.execute(rms, (parts(d * np.asarray(0.5, d.dtype))[0], w), statics))
    return GateResult(
        "norms.add_rms/equals residual.add then norms.rms",
        diff.checked,
        diff.differing,
        moved.differing > 0,
        diff.first,
    )
