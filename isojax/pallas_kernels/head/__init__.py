"""The language-model head: logits, and log-probabilities over a fixed cut of the vocabulary.

The engine has logits (head.logprob_rows); the trainer has hidden states and never forms [T, V] (head.logprob). Both run
one schedule, and change version together: vocabulary leaves from the true vocabulary size; the maximum, and the sum of
exponentials below it, of each tile of 128 logits; a leaf's tiles added in ascending order (sm90: weighed against the
leaf's maximum; cpu: rescaled whenever a tile raises it); a balanced tree over the leaves. In code: `lse` for sm90,
`reference.log_sum_exp` for cpu.
"""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32, Int32

from isojax.pallas_kernels.head import kernel_bwd_sm90, kernel_rows_sm90, kernel_sm90, reference, vjp
from isojax.region import region
from isojax.schedule import LEAVES, VOCAB_TILE, check_tiles

_CONSTANTS = {"vocab_leaves": LEAVES, "vocab_tile": VOCAB_TILE, "temperature": "one fp32 multiply by 1/T", "base": 2}


@region("head.logits", version=1, rows=("hidden",), constants={"chain": "ascending K, one fp32 accumulator"})
def logits(hidden: Float[Array, "T D"], weight: Float[Array, "V D"]) -> Float32[Array, "T V"]:
    """hidden @ weight.T in fp32, not rounded."""
    ...


@region("head.logprob_rows", version=2, rows=("logits", "inv_temperature"), constants=_CONSTANTS)
def logprob_rows(
    logits: Float32[Array, "T V"], inv_temperature: Float32[Array, "T"]
) -> tuple[Float32[Array, "T V"], Float32[Array, "T"]]:
    """log_softmax(logits * inv_temperature) over the whole vocabulary. Residual output: log-sum-exp (natural), [T]."""
    ...


@region("head.logprob", version=2, rows=("hidden", "targets", "inv_temperature"), constants=_CONSTANTS)
def logprob(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    targets: Int32[Array, "T"],
    inv_temperature: Float32[Array, "T"],
    *,
    emit_logits: bool = False,
) -> tuple[Float32[Array, "T"], ...]:
    """Log-probability of each row's target token, without forming [T, V]: the bits of logits + logprob_rows + pick.

    Residual outputs: log-sum-exp [T]; with `emit_logits` (full-vocabulary gates) also the fp32 logits [T, V].
    """
    ...


@region(
    "head.logprob_bwd",
    version=2,
    rows=("hidden", "targets", "inv_temperature", "lse", "ct"),
    constants={
        "dlogits": "rounded to the dtype of hidden",
        "dhidden": "a chain per chunk, chunks added in ascending order in float32, one rounding",
    },
    backward=True,
    adds=("into", 1),
)
def logprob_bwd(
    hidden: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    targets: Int32[Array, "T"],
    inv_temperature: Float32[Array, "T"],
    lse: Float32[Array, "T"],
    ct: Float32[Array, "T"],
    into: Float32[Array, "V D"] | None = None,
    *,
    vocab_chunk: int = reference.VOCAB_CHUNK,
) -> tuple[Float[Array, "T D"], Float32[Array, "V D"]]:
    """Gradients of head.logprob: dhidden (rounded once), dweight (fp32, added to `into` where that is given).

    Memory is O(T x vocab_chunk).
    """
    ...


def _in_row_tiles(rows, *shape):
    check_tiles(rows)
    return ShapeDtypeStruct((rows, *shape), "float32")


logits.reference(reference.logits)
logits.kernel("sm90", kernel_sm90.logits, supports=kernel_sm90.logits_supports)
logits.shapes(lambda hidden, weight: [_in_row_tiles(hidden.shape[0], weight.shape[0])])
logprob_rows.reference(reference.logprob_rows)
logprob_rows.kernel("sm90", kernel_rows_sm90.logprob_rows, supports=kernel_rows_sm90.logprob_rows_supports)
logprob_rows.shapes(lambda logits, inv_temperature: [_in_row_tiles(*logits.shape), _in_row_tiles(logits.shape[0])])
logprob.reference(reference.logprob)
logprob.kernel("sm90", kernel_sm90.logprob, supports=kernel_sm90.logprob_supports)
logprob.vjp(vjp.logprob)
logprob_bwd.reference(reference.logprob_bwd)
logprob_bwd.kernel("sm90", kernel_bwd_sm90.logprob_bwd, supports=kernel_bwd_sm90.supports)
logprob_bwd.outputs = 2
