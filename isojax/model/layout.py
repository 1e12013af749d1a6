"""Where each Hugging Face tensor lives in the packed parameters: permuted once at load, and back at export.

qkv is in Megatron's grouped order (per KV head: its q heads, its k, its v); gate_up is gate over up. A placement is a
view, so that it works on numpy arrays and torch tensors alike, and one buffer serves JAX and torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isojax.errors import CheckpointError
from isojax.model.config import DenseConfig


@dataclass(frozen=True)
class Placement:
    """The view `param.reshape(shape)[index]` holds the Hugging Face tensor of shape `hf_shape`."""

    param: str
    shape: tuple[int, ...]
    index: tuple[Any, ...]
    hf_shape: tuple[int, ...]

    def read(self, param: Any) -> Any:
        return param.reshape(self.shape)[self.index].reshape(self.hf_shape)

    def write(self, param: Any, tensor: Any) -> None:
        """In place; `param` must be contiguous, or its reshape would be a copy."""
        view = param.reshape(self.shape)[self.index]
        view[...] = tensor.reshape(view.shape)


def placements(config: DenseConfig) -> dict[str, Placement]:
    """Hugging Face name -> placement, for every tensor of the model."""
    c = config
    whole = (slice(None),)
    out: dict[str, Placement] = {}

    def same(hf: str, param: str, *shape: int) -> None:
        out[hf] = Placement(param, shape, whole, shape)

    same("model.embed_tokens.weight", "embed", c.vocab, c.hidden)
    same("model.norm.weight", "norm", c.hidden)
    if not c.tied:
        same("lm_head.weight", "head", c.vocab, c.hidden)
    for i in range(c.layers):
        hf, iso = f"model.layers.{i}", f"layers.{i}"
        same(f"{hf}.input_layernorm.weight", f"{iso}.input_norm", c.hidden)
        same(f"{hf}.post_attention_layernorm.weight", f"{iso}.post_norm", c.hidden)
        same(f"{hf}.self_attn.o_proj.weight", f"{iso}.o", c.hidden, c.heads * c.head_dim)
        same(f"{hf}.mlp.down_proj.weight", f"{iso}.down", c.hidden, c.intermediate)
        if c.qk_norm:
            same(f"{hf}.self_attn.q_norm.weight", f"{iso}.q_norm", c.head_dim)
            same(f"{hf}.self_attn.k_norm.weight", f"{iso}.k_norm", c.head_dim)
        for j, name in enumerate(("gate_proj", "up_proj")):
            shape = (2, c.intermediate, c.hidden)
            out[f"{hf}.mlp.{name}.weight"] = Placement(f"{iso}.gate_up", shape, (j,), shape[1:])
        q, k, v = slice(0, c.group), slice(c.group, c.group + 1), slice(c.group + 1, c.group + 2)
        for name, part, heads in (("q_proj", q, c.heads), ("k_proj", k, c.kv_heads), ("v_proj", v, c.kv_heads)):
            shape, index = (c.kv_heads, c.group + 2, c.head_dim), (slice(None), part)
            rows = heads * c.head_dim
            out[f"{hf}.self_attn.{name}.weight"] = Placement(f"{iso}.qkv", (*shape, c.hidden), index, (rows, c.hidden))
            if c.qkv_bias:
                out[f"{hf}.self_attn.{name}.bias"] = Placement(f"{iso}.qkv_bias", shape, index, (rows,))
    return out


def load_into(params: Mapping[str, Any], tensors: Iterable[tuple[str, Any]], config: DenseConfig) -> set[str]:
    """Write Hugging Face tensors into packed parameters; returns the names written.

    Raises: CheckpointError for an unknown name or a wrong shape (naming both shapes). A tied checkpoint may carry its
    lm_head again; it is skipped.
    """
    places, done = placements(config), set()
    for name, tensor in tensors:
        if name == "lm_head.weight" and config.tied or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in places:
            raise CheckpointError(f"tensor {name} does not belong to this {config.family} model; check config.json")
        place = places[name]
        if tuple(tensor.shape) != place.hf_shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}; config.json promises {place.hf_shape}"
            )
        place.write(params[place.param], tensor)
        done.add(name)
    return done


def missing(done: set[str], config: DenseConfig) -> list[str]:
    """Names of tensors that the model needs and `done` lacks."""
    return sorted(set(placements(config)) - done)
