"""Gradients of the feed-forward activations."""

from __future__ import annotations

from isojax.region import Residuals, lookup


def swiglu(res: Residuals, ct):
    return (lookup("mlp.swiglu_bwd")(res.args[0], ct),)
