"""Gates of the norms' gradients."""

from __future__ import annotations

import numpy as np

from isojax.gates.case import Case, ill_conditioned
from isojax.gates.gradients import of_rows, of_weights
from isojax.pallas_kernels.norms import add_rms_bwd, rms_bwd
from isojax.pallas_kernels.norms.gate import COLUMNS, EPS


def _exact(x, weight, rstd, ct, zero_centered):
    x, ct, r = x.astype(np.float64), ct.astype(np.float64), rstd.astype(np.float64)[:, None]
    hat, cg = x * r, ct * (weight.astype(np.float64) + (1.0 if zero_centered else 0.0))
    return r * (cg - hat * (cg * hat).mean(-1, keepdims=True)), (ct * hat).sum(0)


def exact_rms_bwd(x, weight, rstd, ct, *, zero_centered=False):
    return _exact(x, weight, rstd, ct, zero_centered)


def exact_add_rms_bwd(h, weight, rstd, ct_h, ct_y, *, zero_centered=False):
    dx, dw = _exact(h, weight, rstd, ct_y, zero_centered)
    return ct_h.astype(np.float64) + dx, dw


def _operands(rng, rows, cts):
    x, weight = ill_conditioned(rng, rows, COLUMNS), ill_conditioned(rng, COLUMNS)
    rstd = (1 / np.sqrt((x.astype(np.float64) ** 2).mean(1) + EPS)).astype(np.float32)
    return x, weight, rstd, *[ill_conditioned(rng, rows, COLUMNS) for _ in range(cts)]


@rms_bwd.gate_cases
def rms_cases(rng, rows):
    args = _operands(rng, rows, 1)
    plain, zero = (
        Case(n, args, {"zero_centered": z}, None, exact_rms_bwd) for n, z in (("plain", False), ("zero_centered", True))
    )
    return [of_rows(rms_bwd, plain), of_rows(rms_bwd, zero), of_weights(rms_bwd, plain, ["ct"])]


@add_rms_bwd.gate_cases
def add_rms_cases(rng, rows):
    case = Case("plain", _operands(rng, rows, 2), {"zero_centered": False}, None, exact_add_rms_bwd)
    return [of_rows(add_rms_bwd, case), of_weights(add_rms_bwd, case, ["ct_h", "ct_y"])]
