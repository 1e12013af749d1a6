"""RMS normalisation, plain and fused with the residual sum."""

from __future__ import annotations

from isojax.pallas_kernels.norms import kernel_sm90, reference, vjp
from isojax.region import region
from isojax.types import F32, Real

_CONSTANTS = {"accumulate": "float32", "row_sum": "halving tree (cpu); one row per warpgroup (sm90)", "round": "once"}


@region("norms.rms", version=1, rows=("x",), constants=_CONSTANTS)
def rms(x: Real["T D"], weight: Real["D"], *, eps: float, zero_centered: bool = False) -> tuple[Real["T D"], F32["T"]]:
    """x * rsqrt(mean(x^2) + eps) * weight in fp32, rounded once (Zhang and Sennrich, arXiv 1910.07467).

    zero_centered: the stored weight is gamma - 1 (Gemma, Qwen3-Next). Residual output: rstd, [T].
    """
    ...


@region("norms.add_rms", version=1, rows=("x", "delta"), constants=_CONSTANTS, outputs=2)
def add_rms(
    x: Real["T D"], delta: Real["T D"], weight: Real["D"], *, eps: float, zero_centered: bool = False
) -> tuple[Real["T D"], Real["T D"], F32["T"]]:
    """h = residual.add(x, delta); y = norms.rms(h): the bits of the two regions one after the other. -> h, y."""
    ...


@region("norms.rms_bwd", version=1, backward=True)
def rms_bwd(
    x: Real["T D"], weight: Real["D"], rstd: F32["T"], ct: Real["T D"], *, zero_centered: bool
) -> tuple[Real["T D"], F32["D"]]:
    """Gradients of norms.rms: dx (rounded once), dweight (fp32)."""
    ...


@region("norms.add_rms_bwd", version=1, backward=True)
def add_rms_bwd(
    h: Real["T D"], weight: Real["D"], rstd: F32["T"], ct_h: Real["T D"], ct_y: Real["T D"], *, zero_centered: bool
) -> tuple[Real["T D"], F32["D"]]:
    """Gradients of norms.add_rms: dh = ct_h + d(rms), rounded once, which goes to x and delta alike; dweight (fp32)."""
    ...


rms.reference(reference.rms)
rms.kernel("sm90", kernel_sm90.rms, supports=kernel_sm90.rms_supports)
rms.vjp(vjp.rms)
add_rms.reference(reference.add_rms)
add_rms.kernel("sm90", kernel_sm90.add_rms, supports=kernel_sm90.add_rms_supports)
add_rms.vjp(vjp.add_rms)
rms_bwd.reference(reference.rms_bwd)
rms_bwd.kernel("sm90", reference.rms_bwd, kind="xla")
add_rms_bwd.reference(reference.add_rms_bwd)
add_rms_bwd.kernel("sm90", reference.add_rms_bwd, kind="xla")
rms_bwd.outputs = add_rms_bwd.outputs = 2
