"""Parameters between IsoJAX's packed names, Megatron-Core's and Hugging Face's. One rank; shapes are the same.

Names are TE-shaped, the ones that Megatron-Bridge maps; `stock` names are those of Megatron's own local spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from isojax.errors import CheckpointError
from isojax.model import weights
from isojax.model.config import DenseConfig

# A layer's packed parameter -> its name inside a Megatron layer.
LAYER = {
    "input_norm": "self_attention.linear_qkv.layer_norm_weight",
    "qkv": "self_attention.linear_qkv.weight",
    "qkv_bias": "self_attention.linear_qkv.bias",
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "o": "self_attention.linear_proj.weight",
    "post_norm": "mlp.linear_fc1.layer_norm_weight",
    "gate_up": "mlp.linear_fc1.weight",
    "down": "mlp.linear_fc2.weight",
}
STOCK = LAYER | {"input_norm": "input_layernorm.weight", "post_norm": "pre_mlp_layernorm.weight"}


def layer_names(config: DenseConfig) -> dict[str, str]:
    """Packed name -> TE-shaped name, for the parameters that this model's layers have."""
    absent = {"qkv_bias"} if not config.qkv_bias else set()
    absent |= {"q_norm", "k_norm"} if not config.qk_norm else set()
    return {k: v for k, v in LAYER.items() if k not in absent}


def names(config: DenseConfig, stock: bool = False) -> dict[str, str]:
    """Packed dotted name -> Megatron name, for the whole model on one pipeline stage."""
    out = {"embed": "embedding.word_embeddings.weight", "norm": "decoder.final_layernorm.weight"}
    if not config.tied:
        out["head"] = "output_layer.weight"
    parts = {k: (STOCK if stock else LAYER)[k] for k in layer_names(config)}
    for i in range(config.layers):
        out |= {f"layers.{i}.{k}": f"decoder.layers.{i}.{v}" for k, v in parts.items()}
    return out


@torch.no_grad()
def load_packed(
    model: torch.nn.Module, params: Mapping[str, torch.Tensor], config: DenseConfig, stock: bool = False
) -> None:
    """Copy packed parameters into a Megatron model, in place.

    Raises: CheckpointError where the model has parameters that the checkpoint does not fill, or another shape.
    """
    own = dict(model.named_parameters())
    wanted = names(config, stock)
    if set(own) != set(wanted.values()):
        odd = sorted(set(own) ^ set(wanted.values()))
        raise CheckpointError(f"the Megatron model and the configuration differ in parameters: {', '.join(odd[:4])}")
    for ours, theirs in wanted.items():
        source, target = params[ours], own[theirs]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise CheckpointError(
                f"{theirs} is {target.dtype} {tuple(target.shape)}, {ours} {source.dtype} {tuple(source.shape)}"
            )
        target.copy_(source)


def packed(model: torch.nn.Module, config: DenseConfig, stock: bool = False) -> dict[str, torch.Tensor]:
    """The model's parameters (the tensors themselves, detached) under IsoJAX's packed names."""
    own = dict(model.named_parameters())
    return {ours: own[theirs].detach() for ours, theirs in names(config, stock).items()}


def load_hf(model: torch.nn.Module, path: str | Path, config: DenseConfig, stock: bool = False) -> None:
    """Load a Hugging Face checkpoint folder or a GGUF file. Raises: CheckpointError, ConfigError."""
    found, params = weights.load(path, config.dtype)
    if found != config:
        raise CheckpointError(f"{path} is another model than the one that was built: {found} is not {config}")
    load_packed(model, params, config, stock)


def export_hf(model: torch.nn.Module, config: DenseConfig) -> dict[str, torch.Tensor]:
    """The model's weights under Hugging Face names (contiguous copies): what a weight sync sends to the engine."""
    return weights.to_hf(packed(model, config), config)
