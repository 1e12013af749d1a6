"""DenseConfig <-> TransformerConfig: make one from the other, and refuse by name what this bridge does not run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from isojax.errors import Unsupported
from isojax.model.config import DenseConfig
from isojax.model.weights import DTYPES

# Field -> values that this bridge runs. Only effective fields: a fusion flag that nothing reads changes nothing.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "expert_model_parallel_size": (1,),
    "sequence_parallel": (False,),
    "gtp_weight_remat_size": (1,),
    "hidden_dropout": (0.0,),
    "attention_dropout": (0.0,),
    "fp16": (False,),
    "fp8": (None,),
    "fp4": (None,),
    "quant_recipe": (None,),
    "enable_autocast": (False,),
    "fp32_residual_connection": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "add_bias_linear": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "num_moe_experts": (None,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "heterogeneous_block_specs": (False,),
    "mtp_num_layers": (None, 0),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "softmax_type": ("vanilla",),
    "qk_l2_norm": (False,),
    "qk_clip": (False,),
    "attention_output_gate": (False,),
    "rotary_interleaved": (False,),
    "apply_query_key_layer_scaling": (False,),
    "use_mup": (False,),
    "recompute_granularity": (None, "full"),
    "cuda_graph_impl": ("none",),
    "cpu_offloading": (False,),
    "fine_grained_activation_offloading": (False,),
    "defer_embedding_wgrad_compute": (False,),
    "delay_wgrad_compute": (False,),
    "inference_fuse_tp_communication": (False,),
}


def transformer_config(config: DenseConfig, **overrides: Any) -> TransformerConfig:
    """The TransformerConfig of a dense model: no dropout, no fusion, one rank. `overrides` win, and are checked.

    Raises: Unsupported for an override that this bridge does not run.
    """
    dtype = DTYPES[config.dtype]
    fields = shape(config) | {
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }
    for name, value in overrides.items():  # before Megatron's own checks, whose messages name other fields
        _check_field(name, value)
    made = TransformerConfig(**(fields | overrides))
    check(made, config)
    return made


def shape(config: DenseConfig) -> dict[str, Any]:
    """The TransformerConfig fields that say which model it is."""
    return {
        "num_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_query_groups": config.kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate,
        "layernorm_epsilon": config.eps,
        "layernorm_zero_centered_gamma": config.zero_centered,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
    }


def check(given: TransformerConfig, config: DenseConfig) -> None:
    """Raises Unsupported, naming the first field of `given` that this bridge does not run or is another model's."""
    for name in ALLOWED:
        _check_field(name, getattr(given, name, ALLOWED[name][0]))
    if given.activation_func is not F.silu:
        raise _refusal("activation_func", given.activation_func, "torch.nn.functional.silu")
    if given.softmax_scale not in (None, config.scale):
        raise _refusal("softmax_scale", given.softmax_scale, f"None or {config.scale}")
    expected = shape(config) | {"params_dtype": DTYPES[config.dtype]}
    for name, value in expected.items():
        if getattr(given, name) != value:
            raise _refusal(name, getattr(given, name), f"{value!r}, as the checkpoint's configuration has it")


def _check_field(name: str, value: Any) -> None:
    allowed = ALLOWED.get(name)
    if allowed is not None and value not in allowed:
        raise _refusal(name, value, " or ".join(map(repr, allowed)))


def _refusal(name: str, value: Any, allowed: str) -> Unsupported:
    return Unsupported(f"TransformerConfig.{name}", repr(value), allowed, f"set {name} to an allowed value")
