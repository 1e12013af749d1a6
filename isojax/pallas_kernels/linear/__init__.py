"""Linear layers. Weights are [out, in], as Hugging Face and torch keep them."""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32

from isojax.pallas_kernels.linear import kernel_grad_sm90, kernel_sm90, reference, vjp
from isojax.region import region
from isojax.schedule import LEAF_QUANTUM, LEAVES, check_tiles


@region("linear.column", version=1, rows=("x",), constants={"chain": "ascending K, one fp32 accumulator"})
def column(x: Float[Array, "T K"], weight: Float[Array, "N K"]) -> Float[Array, "T N"]:
    """x @ weight.T: one ascending-K chain in fp32, rounded once."""
    ...


@region(
    "linear.row",
    version=1,
    rows=("x",),
    constants={
        "leaves": LEAVES,
        "leaf_dtype": "float32",
        "tree": "balanced, lower leaf left",
        "leaf_quantum": LEAF_QUANTUM,
    },
)
def row(x: Float[Array, "T K"], weight: Float[Array, "N K"], *, leaves: int = LEAVES) -> Float[Array, "T N"]:
    """x @ weight.T with K in `leaves` equal contiguous parts: a chain each in fp32, a balanced tree, one rounding.

    The tree is what makes tensor parallelism bit-exact: a rank owns a contiguous subtree. A leaf whose width is no
    multiple of 16 is zero-padded to one. Raises Unsupported where K does not divide by `leaves`.
    """
    ...


@region(
    "linear.dgrad",
    version=1,
    rows=("ct",),
    constants={"chain": "ascending N, one fp32 accumulator"},
    backward=True,
)
def dgrad(ct: Float[Array, "T N"], weight: Float[Array, "N K"]) -> Float[Array, "T K"]:
    """ct @ weight: the gradient of a linear layer's input, fp32 chain, rounded once."""
    ...


@region(
    "linear.wgrad",
    version=1,
    constants={"chain": "ascending T, one fp32 accumulator"},
    backward=True,
    adds=("into", 0),
)
def wgrad(
    ct: Float[Array, "T N"], x: Float[Array, "T K"], into: Float32[Array, "N K"] | None = None
) -> Float32[Array, "N K"]:
    """ct.T @ x in fp32, not rounded: the gradient of a linear layer's weight; added to `into` where that is given."""
    ...


def _product(x, weight):
    check_tiles(x.shape[0])
    return ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)


column.reference(reference.column)
column.kernel("sm90", kernel_sm90.column, supports=kernel_sm90.column_supports)
column.vjp(vjp.linear)
column.shapes(lambda x, weight: [_product(x, weight)])
row.reference(reference.row, supports=reference.row_supports)
row.kernel("sm90", kernel_sm90.row, supports=kernel_sm90.row_supports)
row.vjp(vjp.row)
row.shapes(lambda x, weight, *, leaves: [_product(x, weight)])
dgrad.reference(reference.dgrad)
dgrad.kernel("sm90", kernel_grad_sm90.dgrad, supports=kernel_grad_sm90.dgrad_supports)
wgrad.reference(reference.wgrad)
wgrad.kernel("sm90", kernel_grad_sm90.wgrad, supports=kernel_grad_sm90.wgrad_supports)
