"""The stock trainer on packed sequences: Megatron's local spec with a flash kernel as its core attention.

Megatron's own core attention forms S x S scores and refuses packed input, and its rotary embedding of packed input
waits for the GPU in every layer. A fair peer does neither: attention is torch's FlashAttention-2 over cu_seqlens
(SDPA, one sequence after the other, on CPU), and the rotary table is laid out once for all packed rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from bridges.megatron import stock, weights
from bridges.megatron.config import transformer_config
from isojax.errors import InputError
from isojax.model.config import DenseConfig
from isojax.model.weights import DTYPES

# Megatron's own fusions that need neither Transformer Engine nor Apex: torch.compile of its activation, of its
# residual sum and of its cross-entropy. They need a compiler at run time, so a CPU run leaves them off.
FUSIONS: dict[str, Any] = {
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "cross_entropy_loss_fusion": True,
    "cross_entropy_fusion_impl": "native",
}


class FlashCoreAttention(torch.nn.Module):
    """Causal attention within packed sequences: q [T, 1, Hq, D], k and v [T, 1, Hkv, D] -> [T, 1, Hq * D].

    `packing` is set by FlashGPTModel before each forward.
    """

    packing: PackedSeqParams

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (x[:, 0] for x in (query, key, value))
        run = _flash if q.is_cuda else _by_sequence
        return run(q, k, v, self.packing, self.scale).reshape(q.shape[0], 1, -1)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: PackedSeqParams, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packing.cu_seqlens_q, packing.max_seqlen_q
    assert cu is not None and longest is not None
    out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0))
    assert isinstance(out, torch.Tensor)
    return out


def _by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: PackedSeqParams, scale: float
) -> torch.Tensor:
    assert packing.cu_seqlens_q is not None
    cu = packing.cu_seqlens_q.tolist()
    parts = []
    for a, b in zip(cu, cu[1:], strict=False):
        one, keys, values = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(one, keys, values, is_causal=True, scale=scale, enable_gqa=True)[0])
    return torch.cat(parts, 1).transpose(0, 1)


class PackedRotary(torch.nn.Module):
    """Megatron's rotary embedding with one row of angles per packed row, [T, 1, 1, D]: its [S, B] path then rotates.

    `positions` [T] is set by FlashGPTModel before each forward.
    """

    positions: torch.Tensor
    rotary: RotaryEmbedding

    def __init__(self, rotary: RotaryEmbedding):
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.rotary(max_seq_len).index_select(0, self.positions)


class FlashGPTModel(stock.StockGPTModel):
    """GPTModel over packed sequences, [1, T]; with labels it returns Megatron's own loss of each token, [1, T]."""

    def forward(
        self, input_ids: torch.Tensor, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
    ) -> Any:
        """Raises: InputError without packed sequences in thd format."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise InputError("FlashGPTModel takes packed sequences; pass packed_seq_params with qkv_format 'thd'")
        for module in self.modules():
            if isinstance(module, FlashCoreAttention):
                module.packing = packed_seq_params
        self.rotary_pos_emb.positions = positions(packed_seq_params, input_ids.shape[1])  # type: ignore[assignment]
        return super().forward(input_ids, *args, **kwargs)


def positions(packing: PackedSeqParams, rows: int) -> torch.Tensor:
    """Each of `rows` packed rows' place in its own sequence, int64: device work only, nothing waits for the GPU."""
    cu = packing.cu_seqlens_q
    assert cu is not None
    row = torch.arange(rows, device=cu.device)
    return row - cu.index_select(0, torch.searchsorted(cu, row, right=True) - 1)


def flash_model(config: DenseConfig, params: Mapping[str, torch.Tensor], **overrides: Any) -> FlashGPTModel:
    """Megatron's local spec, torch's fused RMSNorm, flash attention, on this machine's device.

    overrides: TransformerConfig fields; FUSIONS where there is a GPU.

    Raises: Unsupported for rotary scaling that Megatron's own embedding cannot express; CheckpointError.
    """
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    assert isinstance(layer.submodules.self_attention, ModuleSpec)  # type: ignore[union-attr]
    layer.submodules.self_attention.submodules.core_attention = FlashCoreAttention  # type: ignore[union-attr]
    fields = FUSIONS if torch.cuda.is_available() else {}
    model = FlashGPTModel(
        transformer_config(config, perform_initialization=False, **(fields | overrides)),
        TransformerBlockSubmodules(layer_specs=[layer] * config.layers, layer_norm=WrappedTorchNorm),  # type: ignore[arg-type]
        vocab_size=config.vocab,
        max_sequence_length=config.positions,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied,
        **stock.rope_fields(config.rope),
    )
    model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)  # type: ignore[assignment]
    model.to(DTYPES[config.dtype])  # torch's RMSNorm is built in fp32
    weights.load_packed(model, params, config, stock=True)
    return model.cuda() if torch.cuda.is_available() else model
