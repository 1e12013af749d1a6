"""Causal attention: preparation of q, k, v, and the softmax over a fixed KV partition.

Keys and values travel as one array, [.., Hkv, 2 D]: a token's key, then its value, per KV head. An engine's cache is
the same array in pages, [blocks, block, Hkv, 2 D].
"""

from __future__ import annotations

from jax import ShapeDtypeStruct
from jaxtyping import Array, Float, Float32, Int32

from isojax.pallas_kernels.attn import (
    kernel_core_bwd_sm90,
    kernel_core_sm90,
    kernel_prep_bwd_sm90,
    kernel_prep_sm90,
    reference,
    reference_bwd,
    vjp,
)
from isojax.pallas_kernels.attn.reference_bwd import CHAIN_HEADS
from isojax.region import region
from isojax.schedule import KV_PARTITION, KV_TILE


@region(
    "attn.prep", version=2, rows=("qkv", "positions"), constants={"accumulate": "float32", "round": "once"}, outputs=2
)
def prep(
    qkv: Float[Array, "T W"],
    bias: Float[Array, "W"] | None,
    q_norm: Float[Array, "D"] | None,
    k_norm: Float[Array, "D"] | None,
    rope: Float32[Array, "P D"],
    positions: Int32[Array, "T"],
    *,
    kv_heads: int,
    head_dim: int,
    eps: float = 0.0,
    zero_centered: bool = False,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hkv 2D"]]:
    """Packed qkv to rotated q and packed kv, in fp32 with one rounding at the end.

    qkv: per KV head its q heads, its k, its v (Megatron's grouped order), W = (Hq + 2 Hkv) D.
    bias: added first. q_norm, k_norm: RMS norm over D with `eps`, before the rotation.
    rope: cos in the first D/2 columns, sin in the rest, one row per position (isojax.model.rope); the rotation is
    GPT-NeoX's: halves, not pairs. positions: absolute, in [0, P).
    """
    ...


@region(
    "attn.core",
    version=2,
    rows=(),
    constants={
        "kv_partition": KV_PARTITION,
        "kv_tile": KV_TILE,
        "softmax": "online, base 2, fp32",
        "exponent": "score * c rounded, then - m (cpu); fma(score, c, -m) (sm90)",
        "row_sum": "halving tree a tile (cpu); a thread's columns, then its quad, once a partition (sm90)",
        "probabilities": "rounded to the value dtype",
        "fold": "partitions ascending",
    },
)
def core(
    q: Float[Array, "T Hq D"],
    kv: Float[Array, "..."],
    table: Int32[Array, "R M"] | None,
    cu_q: Int32[Array, "R+1"],
    lens: Int32[Array, "R"],
    work: Int32[Array, "W 2"],
    *,
    scale: float,
    tile: int,
) -> tuple[Float[Array, "T HqD"], Float32[Array, "T Hq"]]:
    """Causal softmax attention of a packed batch (online softmax: Milakov and Gimelshein, arXiv 1805.02867).

    Request r owns query rows cu_q[r] .. cu_q[r+1] and keys 0 .. lens[r]; its last query row sees every key.
    kv: [T, Hkv, 2 D] where the keys are the batch's own (table None), or pages [N, B, Hkv, 2 D] read through `table`.
    work: (request, first query row within the request) of each tile of `tile` query rows; those of request -1 are
    no work and come last.
    `tile` changes speed, never bits (isojax.pallas_kernels.attn.work makes the list).
    Rows that no tile covers are unspecified. Residual output: log-sum-exp in base 2, [T, Hq].
    """
    ...


@region(
    "attn.prep_bwd",
    version=2,
    rows=("qkv", "positions", "dq", "dkv"),
    backward=True,
    constants={"accumulate": "float32", "round": "once", "dparams": "tokens ascending in chunks of 64 (sm90)"},
)
def prep_bwd(
    qkv: Float[Array, "T W"],
    bias: Float[Array, "W"] | None,
    q_norm: Float[Array, "D"] | None,
    k_norm: Float[Array, "D"] | None,
    rope: Float32[Array, "P D"],
    positions: Int32[Array, "T"],
    dq: Float[Array, "T Hq D"],
    dkv: Float[Array, "T Hkv 2D"],
    *,
    kv_heads: int,
    head_dim: int,
    eps: float,
    zero_centered: bool,
) -> tuple[Float[Array, "T W"], ...]:
    """Gradients of attn.prep: dqkv, then fp32 gradients of those of bias, q_norm, k_norm that are present."""
    ...


@region(
    "attn.core_bwd",
    version=2,
    backward=True,
    constants={
        "accumulate": "float32",
        "rows": "ascending from the request's start, one chain a query row",
        "keys": "head after head, rows ascending",
        "chain_heads": CHAIN_HEADS,
        "probabilities": "rounded, as are their gradients",
        "delta": "halving tree (cpu); 8 lanes of 8 columns (sm90)",
    },
)
def core_bwd(
    q: Float[Array, "T Hq D"],
    kv: Float[Array, "T Hkv 2D"],
    cu_q: Int32[Array, "R+1"],
    out: Float[Array, "T HqD"],
    lse: Float32[Array, "T Hq"],
    ct: Float[Array, "T HqD"],
    *,
    scale: float,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T Hkv 2D"]]:
    """Gradients of attn.core over the batch's own keys: dq, dkv (Dao, arXiv 2307.08691, section 3).

    A request's gradients depend on its own rows and on nothing else. Those of rows that belong to no request are zero.
    """
    ...


def _heads(qkv, *_, kv_heads, head_dim, **__):
    rows, width = qkv.shape
    heads = kv_heads * (width // (kv_heads * head_dim) - 2)
    return [
        ShapeDtypeStruct((rows, heads, head_dim), qkv.dtype),
        ShapeDtypeStruct((rows, kv_heads, 2 * head_dim), qkv.dtype),
    ]


def _attended(q, *_, **__):
    rows, heads, head_dim = q.shape
    return [ShapeDtypeStruct((rows, heads * head_dim), q.dtype), ShapeDtypeStruct((rows, heads), "float32")]


prep.reference(reference.prep, supports=reference.prep_supports)
prep.kernel("sm90", kernel_prep_sm90.prep, supports=kernel_prep_sm90.prep_supports)
prep.vjp(vjp.prep)
prep.shapes(_heads)
core.reference(reference.core, supports=reference.core_supports)
core.kernel("sm90", kernel_core_sm90.core, supports=kernel_core_sm90.supports)
core.vjp(vjp.core)
core.shapes(_attended)
prep_bwd.reference(reference.prep_bwd)
prep_bwd.kernel("sm90", kernel_prep_bwd_sm90.prep_bwd, supports=kernel_prep_bwd_sm90.prep_bwd_supports)
prep_bwd.outputs = 4
core_bwd.reference(reference_bwd.core_bwd)
core_bwd.kernel("sm90", kernel_core_bwd_sm90.core_bwd, supports=kernel_core_bwd_sm90.supports)
core_bwd.outputs = 2
