"""Feed-forward activations."""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float

from isojax.pallas_kernels.mlp import kernel_bwd_sm90, kernel_sm90, reference, vjp
from isojax.region import region


@region("mlp.swiglu", version=1, rows=("gate_up",), constants={"sigmoid": "1 / (1 + exp2(-x log2 e))", "round": "once"})
def swiglu(gate_up: Float[Array, "T 2F"]) -> Float[Array, "T F"]:
    """silu(gate) * up in fp32, rounded once; gate and up are the two halves of a row (Shazeer, arXiv 2002.05202)."""
    ...


@region("mlp.swiglu_bwd", version=1, backward=True, rows=("gate_up", "ct"), constants={"round": "once"})
def swiglu_bwd(gate_up: Float[Array, "T 2F"], ct: Float[Array, "T F"]) -> Float[Array, "T 2F"]:
    """Gradient of mlp.swiglu."""
    ...


swiglu.reference(reference.swiglu, supports=reference.swiglu_supports)
swiglu.kernel("sm90", kernel_sm90.swiglu, supports=kernel_sm90.swiglu_supports)
swiglu.vjp(vjp.swiglu)
swiglu.shapes(lambda x: [ShapeDtypeStruct((x.shape[0], x.shape[1] // 2), x.dtype)])
swiglu_bwd.reference(reference.swiglu_bwd)
swiglu_bwd.kernel("sm90", kernel_bwd_sm90.swiglu_bwd, supports=kernel_bwd_sm90.swiglu_bwd_supports)
