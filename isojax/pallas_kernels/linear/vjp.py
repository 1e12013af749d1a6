"""Gradients of the linear regions."""

from __future__ import annotations

from isojax.region import Residuals, lookup


def linear(res: Residuals, ct):
    x, weight = res.args
    return lookup("linear.dgrad")(ct, weight), lookup("linear.wgrad")(ct, x)


def row(res: Residuals, ct, *, leaves):
    return linear(res, ct)
