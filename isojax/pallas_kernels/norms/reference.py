"""Reference schedule of the normalisation regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.schedule import ROW_TILE, padded, sum_halves

f32 = jnp.float32


def gamma(weight, zero_centered: bool):
    """The factor a norm multiplies by, in fp32."""
    w = weight.astype(f32)
    return w + 1.0 if zero_centered else w


def normalise(v, weight, eps, zero_centered):
    """v [..., D] fp32 -> (y fp32, rstd [...])."""
    mean = sum_halves(v * v) * (1.0 / v.shape[-1])
    rstd = jax.lax.rsqrt(mean + eps)
    return v * rstd[..., None] * gamma(weight, zero_centered), rstd


def rms(x, weight, *, eps, zero_centered):
    y, rstd = normalise(x.astype(f32), weight, eps, zero_centered)
    return y.astype(x.dtype), rstd


def add_rms(x, delta, weight, *, eps, zero_centered):
    h = (x.astype(f32) + delta.astype(f32)).astype(x.dtype)
    # the sum is rounded for the residual stream and normalised as rounded; the fence keeps that rounding
    h = jax.lax.optimization_barrier(h)
    y, rstd = rms(h, weight, eps=eps, zero_centered=zero_centered)
    return h, y, rstd


def sum_rows(terms):
    """[T, ...] -> sum over T: the rows of a chunk by halving, the chunks ascending, so that rows of zeros at the end
    change nothing."""
    rows = padded(terms.shape[0], ROW_TILE)
    terms = jnp.pad(terms, [(0, rows - terms.shape[0])] + [(0, 0)] * (terms.ndim - 1))
    chunks = jnp.moveaxis(terms.reshape(-1, ROW_TILE, *terms.shape[1:]), 1, -1)
    return jax.lax.scan(lambda total, c: (total + sum_halves(c), None), jnp.zeros(terms.shape[1:], f32), chunks)[0]


def _dx_dw(x, weight, rstd, ct, zero_centered):
    v, c, g = x.astype(f32), ct.astype(f32), gamma(weight, zero_centered)
    xhat = v * rstd[:, None]
    cg = c * g
    mean = sum_halves(cg * xhat) * (1.0 / v.shape[-1])
    return rstd[:, None] * (cg - xhat * mean[:, None]), sum_rows(c * xhat)


def rms_bwd(x, weight, rstd, ct, *, zero_centered):
    dx, dw = _dx_dw(x, weight, rstd, ct, zero_centered)
    return dx.astype(x.dtype), dw


def add_rms_bwd(h, weight, rstd, ct_h, ct_y, *, zero_centered):
    dx, dw = _dx_dw(h, weight, rstd, ct_y, zero_centered)
    return (ct_h.astype(f32) + dx).astype(h.dtype), dw
