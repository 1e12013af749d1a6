"""The seat of one layer's cache: vLLM allocates a paged tensor for it and binds it here."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

from bridges.vllm.backend import IsoAttentionBackend
from bridges.vllm.step import Step
from isojax.model.config import DenseConfig


class IsoAttention(AttentionLayerBase):
    """Holds `kv_cache`, [blocks, block, Hkv, 2 D] once vLLM has bound it, and the model's step buffers."""

    supports_dcp = False

    def __init__(self, name: str, config: DenseConfig, dtype: torch.dtype, step: Step, vllm_config: Any):
        self.name, self.config, self.dtype, self.step = name, config, dtype, step
        self.num_heads = config.heads
        self.kv_cache = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"two layers are named {name}")
        layers[name] = self

    @property
    def bound(self) -> bool:
        return self.kv_cache.numel() > 0

    def get_attn_backend(self) -> type[IsoAttentionBackend]:
        return IsoAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.config.kv_heads,
            head_size=self.config.head_dim,
            dtype=self.dtype,
        )
