"""Distance of an output from its exact value, computed in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Accuracy(NamedTuple):
    """ulp: largest error in units of the last place of the exact value (0.5 is a correct rounding).
    relative: largest error over the largest magnitude in its row (last axis): what cancellation leaves meaningful.
    """

    ulp: float
    relative: float


def against_float64(got: Any, exact: np.ndarray) -> Accuracy:
    """Compare an output of any floating dtype with exact values. Raises ValueError on NaN or on unequal shapes."""
    got = np.asarray(got)
    if got.shape != exact.shape or exact.dtype != np.float64:
        raise ValueError(f"exact values have to be float64{got.shape}; given {exact.dtype}{exact.shape}")
    info = jnp.finfo(got.dtype)
    error = np.abs(got.astype(np.float64) - exact)
    if np.isnan(error).any():
        raise ValueError("NaN in an accuracy check")
    exponent = np.floor(np.log2(np.maximum(np.abs(exact), float(info.smallest_normal))))
    rows = np.abs(exact).max(axis=-1, keepdims=True) if exact.ndim else np.abs(exact)
    scale = np.maximum(rows, float(info.smallest_normal))
    return Accuracy(float((error / np.exp2(exponent - info.nmant)).max()), float((error / scale).max()))
