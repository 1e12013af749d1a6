"""Where gradients meet."""

from __future__ import annotations

from jaxtyping import Array, Float

from isojax.pallas_kernels.grad import kernel_sm90, reference
from isojax.region import region


@region(
    "grad.accumulate", version=1, backward=True, constants={"accumulate": "float32", "order": "operands, ascending"}
)
def accumulate(*parts: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum of the operands in fp32, in their order, rounded once to the first operand's dtype."""
    ...


accumulate.reference(reference.accumulate)
accumulate.kernel("sm90", kernel_sm90.accumulate, supports=kernel_sm90.accumulate_supports)
