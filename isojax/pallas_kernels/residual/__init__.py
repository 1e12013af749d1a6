"""The residual stream."""

from __future__ import annotations

from jaxtyping import Array, Float

from isojax.pallas_kernels.residual import kernel_sm90, reference, vjp
from isojax.region import region


@region("residual.add", version=1, rows=("x", "delta"), constants={"accumulate": "float32", "round": "once"})
def add(x: Float[Array, "T D"], delta: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """x + delta in fp32, rounded once to x's dtype: the value at a layer's boundary."""
    ...


add.reference(reference.add)
add.kernel("sm90", kernel_sm90.add, supports=kernel_sm90.add_supports)
add.vjp(vjp.add)
add.shapes(lambda x, delta: [x])
