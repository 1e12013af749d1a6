"""Reference schedule of the normalisation regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isojax.schedule import sum_halves

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


def _dx_dw(x, weight, rstd, ct, zero_centered):
    v, c, g = x.astype(f32), ct.astype(f32), gamma(weight, zero_centered)
    xhat = v * rstd[:, None]
    cg = c * g
    dx = rstd[:, None] * (cg - xhat * jnp.mean(cg * xhat, -1, keepdims=True))
    return dx, jnp.sum(c * xhat, 0)


def rms_bwd(x, weight, rstd, ct, *, zero_centered):
    dx, dw = _dx_dw(x, weight, rstd, ct, zero_centered)
    return dx.astype(x.dtype), dw


def add_rms_bwd(h, weight, rstd, ct_h, ct_y, *, zero_centered):
    dx, dw = _dx_dw(h, weight, rstd, ct_y, zero_centered)
    return (ct_h.astype(f32) + dx).astype(h.dtype), dw
