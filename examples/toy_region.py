"""A region defined outside the package: a norm by the mean absolute value, in one file.

docs/tutorial.md walks through it, and tests/integration/test_four_uses.py runs it: standalone in JAX, plugged into a
stock vLLM model by one line, plugged into a stock Megatron spec by one line, with the same bits in all three.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from isojax.errors import Unsupported
from isojax.gates.case import Case, ill_conditioned, many
from isojax.region import Call, Residuals, lookup, region
from isojax.schedule import sum_halves
from isojax.types import spec

f32 = jnp.float32


# 1. The signature: operands by position, statics by keyword. `rows` says which operands have one row per token.
@region("toy.mean_abs_norm", version=1, rows=("x",), constants={"accumulate": "float32", "round": "once"})
def mean_abs_norm(
    x: Float[Array, "T D"], weight: Float[Array, "D"], *, eps: float
) -> tuple[Float[Array, "T D"], Float32[Array, "T"]]:
    """x * weight / (mean |x| + eps), in fp32, rounded once. Residual output: the row's scale, [T]."""
    ...


# 2. The reference: the same schedule in jnp. It is the `cpu` implementation, and what the kernel is checked against.
def reference(x, weight, *, eps):
    v = x.astype(f32)
    scale = 1.0 / (sum_halves(jnp.abs(v)) * (1.0 / v.shape[-1]) + eps)
    return (v * scale[:, None] * weight.astype(f32)).astype(x.dtype), scale


# 3. The kernel: one warpgroup per row, so that a row's sum has the same tree in every batch.
def supports(x, weight, *, eps):
    if x.shape[1] % 128:
        given, allowed = f"{x.shape[1]} columns", "a multiple of 128 on sm90, one element a thread"
        raise Unsupported("toy.mean_abs_norm", given, allowed, "pad the rows, or use arch cpu")


def kernel(x, weight, *, eps):
    rows, columns = x.shape
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=1)

    def body(x, weight, y, scale):
        t = lax.axis_index("row")
        v = plgpu.load(x.at[t], layout=layout, optimized=False).astype(f32)
        w = plgpu.load(weight, layout=layout, optimized=False).astype(f32)
        s = 1.0 / (jnp.sum(jnp.abs(v)) * (1.0 / columns) + eps)
        y[t] = (v * s * w).astype(y.dtype)
        scale[t] = s

    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows,), f32))
    return plgpu.kernel(body, out_type=out, grid=(rows,), grid_names=("row",))(x, weight)


# 4. The gradient is made of regions too. This one has no kernel yet, and says so: on a GPU, XLA runs its reference.
@region("toy.mean_abs_norm_bwd", version=1, backward=True)
def mean_abs_norm_bwd(
    x: Float[Array, "T D"], weight: Float[Array, "D"], scale: Float32[Array, "T"], ct: Float[Array, "T D"]
) -> tuple[Float[Array, "T D"], Float32[Array, "D"]]:
    """Gradients of toy.mean_abs_norm: dx (rounded once), dweight (fp32)."""
    ...


def backward(x, weight, scale, ct):
    v, c, s = x.astype(f32), ct.astype(f32), scale[:, None]
    cw = c * weight.astype(f32)
    dx = cw * s - jnp.sign(v) * s * s * jnp.sum(cw * v, -1, keepdims=True) * (1.0 / v.shape[1])
    return dx.astype(x.dtype), jnp.sum(c * v * s, 0)


mean_abs_norm_bwd.outputs = 2
mean_abs_norm_bwd.reference(backward)
mean_abs_norm_bwd.kernel("sm90", backward, kind="xla")


def vjp(res: Residuals, ct, *, eps):
    x, weight = res.args
    return lookup("toy.mean_abs_norm_bwd")(x, weight, res.outs[1], ct)


mean_abs_norm.reference(reference)
mean_abs_norm.kernel("sm90", kernel, supports=supports)
mean_abs_norm.vjp(vjp)


# 5. What a contract hashes to name this kernel.
@mean_abs_norm.canonical_calls
def _():
    return [Call((spec("bf16", 64, 256), spec("bf16", 256)), dict(eps=1e-6))]


# 6. What its gate feeds it: `isojax gate toy.mean_abs_norm --load examples.toy_region`.
@mean_abs_norm.gate_cases
def _(rng, rows):
    def altered(x, weight, *, eps):
        """Above the boundary neighbours are added first: the gate has to see that one reassociation."""
        v = jnp.abs(x.astype(f32))
        total = sum_halves(v[:, ::2] + v[:, 1::2] if many(x) else v)
        scale = 1.0 / (total * (1.0 / x.shape[1]) + eps)
        return (x.astype(f32) * scale[:, None] * weight.astype(f32)).astype(x.dtype), scale

    args = ill_conditioned(rng, rows, 512), ill_conditioned(rng, 512)
    return Case("plain", args, {"eps": 1e-6}, altered)
