"""RMS normalisation, plain and fused with the residual sum."""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32

from isojax.pallas_kernels.norms import kernel_bwd_sm90, kernel_sm90, reference, vjp
from isojax.region import region

_CONSTANTS = {"accumulate": "float32", "row_sum": "halving tree (cpu); one row per warpgroup (sm90)", "round": "once"}
_BWD_CONSTANTS = {**_CONSTANTS, "dweight": "fp32; rows of a chunk ascending, then groups of chunks (sm90)"}


@region("norms.rms", version=1, rows=("x",), constants=_CONSTANTS)
def rms(
    x: Float[Array, "T D"], weight: Float[Array, "D"], *, eps: float, zero_centered: bool = False
) -> tuple[Float[Array, "T D"], Float32[Array, "T"]]:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded once (Zhang and Sennrich, arXiv 1910.07467).

    zero_centered: the stored weight is gamma - 1 (Gemma, Qwen3-Next). Residual output: rstd, [T].
    """
    ...


@region("norms.add_rms", version=1, rows=("x", "delta"), constants=_CONSTANTS, outputs=2)
def add_rms(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float32[Array, "T"]]:
    """h = residual.add(x, delta); y = norms.rms(h): the bits of the two regions one after the other. -> h, y."""
    ...


@region("norms.rms_bwd", version=2, backward=True, rows=("x", "rstd", "ct"), constants=_BWD_CONSTANTS)
def rms_bwd(
    x: Float[Array, "T D"],
    weight: Float[Array, "D"],
    rstd: Float32[Array, "T"],
    ct: Float[Array, "T D"],
    *,
    zero_centered: bool,
) -> tuple[Float[Array, "T D"], Float32[Array, "D"]]:
    """Gradients of norms.rms: dx (rounded once), dweight (fp32)."""
    ...


@region("norms.add_rms_bwd", version=2, backward=True, rows=("h", "rstd", "ct_h", "ct_y"), constants=_BWD_CONSTANTS)
def add_rms_bwd(
    h: Float[Array, "T D"],
    weight: Float[Array, "D"],
    rstd: Float32[Array, "T"],
    ct_h: Float[Array, "T D"],
    ct_y: Float[Array, "T D"],
    *,
    zero_centered: bool,
) -> tuple[Float[Array, "T D"], Float32[Array, "D"]]:
    """Gradients of norms.add_rms: dh = ct_h + d(rms), rounded once, which goes to x and delta alike; dweight (fp32)."""
    ...


def _per_row(x):
    return ShapeDtypeStruct(x.shape[:1], "float32")


rms.reference(reference.rms)
rms.kernel("sm90", kernel_sm90.rms, supports=kernel_sm90.rms_supports)
rms.vjp(vjp.rms)
rms.shapes(lambda x, weight, **_: [x, _per_row(x)])
add_rms.reference(reference.add_rms)
add_rms.kernel("sm90", kernel_sm90.add_rms, supports=kernel_sm90.add_rms_supports)
add_rms.vjp(vjp.add_rms)
add_rms.shapes(lambda x, delta, weight, **_: [x, x, _per_row(x)])
rms_bwd.reference(reference.rms_bwd)
rms_bwd.kernel("sm90", kernel_bwd_sm90.rms_bwd, supports=kernel_bwd_sm90.rms_bwd_supports)
add_rms_bwd.reference(reference.add_rms_bwd)
add_rms_bwd.kernel("sm90", kernel_bwd_sm90.add_rms_bwd, supports=kernel_bwd_sm90.add_rms_bwd_supports)
rms_bwd.outputs = add_rms_bwd.outputs = 2
