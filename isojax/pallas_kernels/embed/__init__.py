"""Token embedding: rows of a table."""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32, Int32

from isojax.pallas_kernels.embed import kernel_bwd_sm90, kernel_sm90, reference, vjp
from isojax.region import region


@region("embed.lookup", version=1, rows=("tokens",))
def lookup(table: Float[Array, "V D"], tokens: Int32[Array, "T"]) -> Float[Array, "T D"]:
    """table[tokens]. Tokens must lie in [0, V): callers check, since an out-of-range id has no right value."""
    ...


@region(
    "embed.lookup_bwd",
    version=1,
    backward=True,
    constants={"accumulate": "float32", "order": "rows of a token, ascending position"},
    adds=("into", 0),
)
def lookup_bwd(
    tokens: Int32[Array, "T"], ct: Float[Array, "T D"], into: Float32[Array, "V D"] | None = None, *, vocab: int
) -> Float32[Array, "V D"]:
    """Gradient of the table: fp32, rows added in ascending token position; the sums added to `into` where given."""
    ...


lookup.reference(reference.lookup)
lookup.kernel("sm90", kernel_sm90.lookup, supports=kernel_sm90.lookup_supports)
lookup.vjp(vjp.lookup)
lookup.shapes(lambda table, tokens: [ShapeDtypeStruct((tokens.shape[0], table.shape[1]), table.dtype)])
lookup_bwd.reference(reference.lookup_bwd)
lookup_bwd.kernel("sm90", kernel_bwd_sm90.lookup_bwd, supports=kernel_bwd_sm90.lookup_bwd_supports)
