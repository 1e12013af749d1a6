"""Gradients of the normalisation regions."""

from __future__ import annotations

from isojax.region import Residuals, lookup


def rms(res: Residuals, ct, *, eps, zero_centered):
    x, weight = res.args
    _, rstd = res.outs
    return lookup("norms.rms_bwd")(x, weight, rstd, ct, zero_centered=zero_centered)


def add_rms(res: Residuals, cts, *, eps, zero_centered):
    _, _, weight = res.args
    h, _, rstd = res.outs
    dh, dw = lookup("norms.add_rms_bwd")(h, weight, rstd, *cts, zero_centered=zero_centered)
    return dh, dh, dw
