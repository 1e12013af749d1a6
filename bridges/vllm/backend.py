"""What vLLM's model runner asks of an attention backend: the cache's shape, and the metadata of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)

from bridges.vllm.step import Arrays, Step


@dataclass
class IsoMetadata(AttentionMetadata):
    """Of one step; every layer gets the same object. common: vLLM's CommonAttentionMetadata, for `Step.take`."""

    arrays: Arrays
    common: CommonAttentionMetadata


class IsoMetadataBuilder(AttentionMetadataBuilder[IsoMetadata]):
    """Fills the model's step buffers, once a step. ALWAYS: their addresses and shapes depend on the bucket alone."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self.step: Step = layer.step

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> IsoMetadata:
        del common_prefix_len, fast_build  # cascade attention would be another order of addition
        return IsoMetadata(self.step.fill(common_attn_metadata), common_attn_metadata)


class IsoAttentionBackend(AttentionBackend):
    """Pages of [block, Hkv, 2 D]: a token's key, then its value. The Program reads and writes them itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("attention runs inside the model's Program; there is no per-layer implementation")

    @staticmethod
    def get_builder_cls() -> type[IsoMetadataBuilder]:
        return IsoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]  # so that a kernel's page is always vLLM's block

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        del cache_dtype_str  # bridges.vllm.supported admits the model's own dtype only
        return num_blocks, block_size, num_kv_heads, 2 * head_size
