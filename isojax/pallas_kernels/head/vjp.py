"""Gradients of the head."""

from __future__ import annotations

from isojax.region import Residuals, lookup


def logprob(res: Residuals, ct, *, emit_logits):
    hidden, weight, targets, inv_temperature = res.args
    dh, dw = lookup("head.logprob_bwd")(hidden, weight, targets, inv_temperature, res.outs[1], ct)
    return dh, dw, None, None
