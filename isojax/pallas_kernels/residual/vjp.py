"""Gradients of the residual regions."""

from __future__ import annotations

from isojax.region import Residuals


def add(res: Residuals, ct):
    return ct, ct
