"""The stock trainer: Megatron-Core's own local spec on the same weights, with its own log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bridges.megatron import weights
from bridges.megatron.config import transformer_config
from isojax.errors import Unsupported
from isojax.model.config import DenseConfig, Rope
from isojax.model.weights import DTYPES

# Megatron's llama3 scaling has these built in.
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192)


class StockGPTModel(GPTModel):
    """GPTModel as Megatron ships it; only the log-probabilities are put together here, from its own functions."""

    def logprobs(self, tokens: torch.Tensor, labels: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
        """[B, S] fp32 of right-padded tokens [B, S]: -vocab_parallel_cross_entropy of its logits, divided by T."""
        s = tokens.shape[1]
        causal = ~torch.ones(1, 1, s, s, dtype=torch.bool, device=tokens.device).tril()
        positions = torch.arange(s, device=tokens.device).expand_as(tokens)
        logits = self(tokens, positions, causal).transpose(0, 1).float()
        if temperature != 1.0:
            logits = logits / temperature
        # The cross-entropy overwrites fp32 logits, so it gets its own.
        return -vocab_parallel_cross_entropy(
            logits.clone(memory_format=torch.contiguous_format), labels.t().contiguous()
        ).t()


def stock_model(config: DenseConfig, params: Mapping[str, torch.Tensor], **overrides: Any) -> StockGPTModel:
    """Megatron's local spec with torch's RMSNorm (no Transformer Engine, no Apex), on this machine's device.

    Raises: Unsupported for rotary scaling that Megatron's own embedding cannot express; CheckpointError.
    """
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_norm, normalization="RMSNorm")
    model = StockGPTModel(
        transformer_config(config, perform_initialization=False, **overrides),
        TransformerBlockSubmodules(layer_specs=[layer] * config.layers, layer_norm=WrappedTorchNorm),  # type: ignore[arg-type]
        vocab_size=config.vocab,
        max_sequence_length=config.positions,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tied,
        **rope_fields(config.rope),
    )
    model.to(DTYPES[config.dtype])  # torch's RMSNorm is built in fp32
    weights.load_packed(model, params, config, stock=True)
    return model.cuda() if torch.cuda.is_available() else model


def rope_fields(rope: Rope) -> dict[str, Any]:
    base: dict[str, Any] = {"rotary_base": rope.theta}
    if rope.kind == "linear":
        return base | {"seq_len_interpolation_factor": rope.factor}
    if rope.kind == "llama3":
        if any(getattr(rope, k) != v for k, v in _LLAMA3.items()):
            raise Unsupported("stock rotary embedding", repr(rope), f"llama3 with {_LLAMA3}", "compare another model")
        return base | {"rope_scaling": True, "rope_scaling_factor": rope.factor}
    return base
