"""Checkpoints: Hugging Face safetensors (one file or sharded) and GGUF, as packed parameters, and back.

Parameters are torch tensors; `as_jax` gives JAX views of the same memory (DLPack), so both frameworks share one buffer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import torch

from isojax.errors import CheckpointError
from isojax.model import dense, layout
from isojax.model.config import DenseConfig, hf_config, load_config

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_1")


def load(path: str | Path, dtype: str = "bfloat16", device: str = "cpu") -> tuple[DenseConfig, dict[str, torch.Tensor]]:
    """(config, packed parameters) of a checkpoint folder or GGUF file.

    Raises: CheckpointError where a file is missing, truncated or wrongly shaped; ConfigError for an unsupported field.
    """
    config = load_config(path, dtype)
    params = allocate(config, device)
    done = layout.load_into(params, tensors(path, config), config)
    absent = layout.missing(done, config)
    if absent:
        raise CheckpointError(
            f"{path} lacks {len(absent)} tensors, the first is {absent[0]}; the checkpoint is incomplete"
        )
    return config, params


def allocate(config: DenseConfig, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Uninitialised packed parameters by dotted name."""
    _, specs = dense.abstract(config)
    return {k: torch.empty(tuple(s.shape), dtype=DTYPES[config.dtype], device=device) for k, s in specs.items()}


def random(config: DenseConfig, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random packed parameters of realistic magnitude: matrices N(0, 1/in), norms near 1, biases small."""
    generator = torch.Generator(device=device).manual_seed(seed)
    params = allocate(config, device)
    for name, p in params.items():
        leaf = name.rsplit(".", 1)[-1]
        p.normal_(0.0, p.shape[-1] ** -0.5 if p.ndim == 2 else 0.1, generator=generator)
        if leaf in ("input_norm", "post_norm", "norm", "q_norm", "k_norm"):
            p.add_(1.0)
    return params


def as_jax(params: Mapping[str, torch.Tensor]) -> dict[str, jax.Array]:
    """JAX arrays over the parameters; zero-copy where the memory is 64-byte aligned, as torch's allocations are."""
    return {k: jax.dlpack.from_dlpack(p.detach().contiguous()) for k, p in params.items()}


def tensors(path: str | Path, config: DenseConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor in the model's dtype), one at a time. Raises CheckpointError."""
    path = Path(path)
    source = _gguf(path, config) if path.suffix == ".gguf" else _safetensors(path)
    for name, tensor in source:
        yield name, tensor.to(DTYPES[config.dtype])


def _safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as e:
            raise CheckpointError(f"{index} is malformed ({e!r}); restore it") from e
    else:
        files = sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file; convert the checkpoint with save_pretrained")
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is named by the index but missing; download the shard")
        try:
            with safe_open(folder / name, framework="pt") as f:
                for key in f.keys():  # noqa: SIM118  safe_open is no mapping
                    yield key, f.get_tensor(key)
        except SafetensorError as e:
            raise CheckpointError(
                f"{folder / name} is truncated or no safetensors file ({e}); download it again"
            ) from e


_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _gguf(path: Path, config: DenseConfig) -> Iterator[tuple[str, torch.Tensor]]:
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
    except Exception as e:  # the reader raises bare struct and value errors on damaged files
        raise CheckpointError(f"{path} is truncated or no GGUF file ({e}); download it again") from e
    for t in reader.tensors:
        name = _gguf_name(t.name)
        if name is None:
            continue
        if t.tensor_type.name not in GGUF_TYPES:
            raise CheckpointError(
                f"{path}: tensor {t.name} is {t.tensor_type.name}; supported are {', '.join(GGUF_TYPES)}; requantise it"
            )
        shape = tuple(int(n) for n in reversed(t.shape))
        value = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).reshape(shape).copy())
        # llama.cpp stores Llama's q and k for interleaved rotation; undo it, for rotation by halves
        if config.family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.heads if "q_proj" in name else config.kv_heads
            value = value.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        yield name, value


def _gguf_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{kind}"
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _GGUF_LAYER:
            return f"model.layers.{layer}.{_GGUF_LAYER[part]}.{kind}"
    return None if stem in ("rope_freqs", "") else name


def to_hf(params: Mapping[str, torch.Tensor], config: DenseConfig) -> dict[str, torch.Tensor]:
    """Hugging Face tensors (contiguous copies) of packed parameters."""
    return {name: p.read(params[p.param]).contiguous() for name, p in layout.placements(config).items()}


def export(source: str | Path, folder: str | Path, dtype: str = "bfloat16") -> Path:
    """Write a checkpoint (GGUF or safetensors) as a Hugging Face folder: config, tokenizer, one safetensors file.

    The folder appears whole or not at all. Raises as `load` does.
    """
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source, folder = Path(source), Path(folder)
    if (folder / "config.json").is_file():
        return folder
    config, params = load(source, dtype)
    hf = hf_config(source)
    hf.dtype = dtype
    hf.architectures = [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[config.family] + "ForCausalLM"]
    hf.tie_word_embeddings = config.tied
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + ".part-"))
    try:
        save_file(to_hf(params, config), work / "model.safetensors", {"format": "pt"})
        hf.save_pretrained(work)
        kwargs: dict[str, Any] = {"gguf_file": source.name} if source.suffix == ".gguf" else {}
        where = source.parent if source.suffix == ".gguf" else source
        AutoTokenizer.from_pretrained(where, **kwargs).save_pretrained(work)
        try:
            os.replace(work, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process wrote the same folder meanwhile
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
