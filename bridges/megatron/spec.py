"""Specs: IsoJAX modules under the parameter names of Transformer Engine's specs, which Megatron-Bridge maps."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bridges.megatron.layer import IsoTransformerLayer
from bridges.megatron.modules import (
    IsoColumnParallelLinear,
    IsoCoreAttention,
    IsoLayerNormColumnParallelLinear,
    IsoRMSNorm,
    IsoRowParallelLinear,
    IsoSwiGLU,
)
from bridges.megatron.runtime import Runtime
from isojax.errors import Unsupported
from isojax.model.config import DenseConfig


class IsoSpecProvider(LocalSpecProvider):
    """Megatron's BackendSpecProvider, for its *_for_backend spec helpers."""

    def column_parallel_linear(self) -> type:
        return IsoColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return IsoRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return IsoLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return IsoRMSNorm

    def core_attention(self) -> type:
        return IsoCoreAttention

    def activation_func(self) -> Any:
        return IsoSwiGLU

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        raise Unsupported("megatron spec", "mixture of experts", "dense models", "use a dense model")


def submodules(qk_norm: bool) -> TransformerLayerSubmodules:
    """The modules of one layer."""
    backend = IsoSpecProvider()
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_layer_norm_linear(),
        core_attention=backend.core_attention(),
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=IsoRMSNorm if qk_norm else None,
        k_layernorm=IsoRMSNorm if qk_norm else None,
    )
    return TransformerLayerSubmodules(
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]  Megatron gives its own specs the same function
        mlp=get_mlp_module_spec_for_backend(backend=backend, use_te_activation_func=True),
        mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
    )


def layer_spec(config: DenseConfig, runtime: Runtime | None = None) -> ModuleSpec:
    """One layer that runs as one Program. Layers of a model should share their Runtime (block_spec sees to it)."""
    return ModuleSpec(
        module=IsoTransformerLayer,
        params={"runtime": runtime or Runtime(config)},
        submodules=submodules(config.qk_norm),
    )


def block_spec(config: DenseConfig, runtime: Runtime | None = None) -> TransformerBlockSubmodules:
    """All layers and the final norm: GPTModel's transformer_layer_spec, and that of Megatron-Bridge's providers."""
    layer = layer_spec(config, runtime)
    return TransformerBlockSubmodules(layer_specs=[layer] * config.layers, layer_norm=IsoRMSNorm)


def module_layer_spec(qk_norm: bool = False) -> ModuleSpec:
    """Megatron's own layer around IsoJAX modules: its rope and residual sums remain, so no contract covers it whole."""
    return ModuleSpec(module=TransformerLayer, submodules=submodules(qk_norm))
