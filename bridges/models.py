"""The models that whole runtimes are benchmarked with, by name: a layer's sizes are those of isojax.gates.shapes."""

from __future__ import annotations

import dataclasses

from isojax.errors import InputError
from isojax.gates import shapes
from isojax.model.config import DenseConfig, Rope


def _qwen3(m: shapes.Model, layers: int, tied: bool) -> DenseConfig:
    sizes = m.vocab, m.hidden, m.ffn, layers, m.heads, m.kv_heads, m.head_dim, m.eps
    return DenseConfig("qwen3", *sizes, positions=40960, tied=tied, qk_norm=True, rope=Rope(theta=1e6))


MODELS = {
    "tiny": _qwen3(shapes.Model("tiny", 256, 4, 2, 64, 512, 512), 2, tied=True),
    "qwen3-1.7b": _qwen3(shapes.QWEN3_1_7B, 28, tied=True),
    "qwen3-8b": _qwen3(shapes.QWEN3_8B, 36, tied=False),
}


def cut(config: DenseConfig, layers: int) -> DenseConfig:
    """The model with its first `layers` layers, 0 for all. Raises InputError."""
    if not 0 <= layers <= config.layers:
        raise InputError(f"{layers} layers of a model of {config.layers}; give 1 to {config.layers}, or 0 for all")
    return dataclasses.replace(config, layers=layers or config.layers)
