"""Rotary tables, computed once on the host: attn.prep reads a row per position, so no kernel computes an angle."""

from __future__ import annotations

import math

import numpy as np

from isojax.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """[D/2] float32, as transformers computes them."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv = (1.0 / np.power(np.float32(rope.theta), exponent)).astype(np.float32)
    if rope.kind == "linear":
        return inv / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(inv, rope)
    return inv


def _llama3(inv: np.ndarray, rope: Rope) -> np.ndarray:
    """Long waves are stretched by `factor`, short ones kept, the band between interpolated (Llama 3.1)."""
    wavelength = 2 * math.pi / inv
    longest = rope.original_positions / rope.low_freq_factor
    shortest = rope.original_positions / rope.high_freq_factor
    smooth = (rope.original_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * inv / rope.factor + smooth * inv
    out = np.where(wavelength > longest, inv / rope.factor, inv)
    band = (wavelength <= longest) & (wavelength >= shortest)
    return np.where(band, between, out).astype(np.float32)


def table(rope: Rope, head_dim: int, positions: int) -> np.ndarray:
    """[positions, D] float32: cos of each angle, then sin. Angles are fp32 products; cos and sin exact to fp32."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)
    exact = angles.astype(np.float64)
    return np.concatenate([np.cos(exact), np.sin(exact)], 1).astype(np.float32)
