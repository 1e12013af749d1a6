"""Gate of attn.prep: rows with their positions, for each family's choice of bias and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from isojax.gates.case import Case, ill_conditioned, many
from isojax.pallas_kernels.attn import prep, reference

POSITIONS = 500


def _altered(qkv, bias, q_norm, k_norm, rope, positions, **statics):
    """Above the boundary the rotation's factors are rounded to bf16."""
    if many(qkv):
        rope = rope.astype(jnp.bfloat16).astype(jnp.float32)
    return reference.prep(qkv, bias, q_norm, k_norm, rope, positions, **statics)


def exact(qkv, bias, q_norm, k_norm, rope, positions, *, kv_heads, head_dim, eps, zero_centered):
    f64 = np.float64
    x = qkv.astype(f64) + (0.0 if bias is None else bias.astype(f64))
    x = x.reshape(len(x), kv_heads, -1, head_dim)
    q, k, v = x[:, :, :-2], x[:, :, -2:-1], x[:, :, -1]
    cos, sin = np.split(rope.astype(f64)[positions][:, None, None], 2, -1)

    def rotated(h, norm):
        if norm is not None:
            gamma = norm.astype(f64) + (1.0 if zero_centered else 0.0)
            h = h / np.sqrt((h * h).mean(-1, keepdims=True) + eps) * gamma
        a, b = np.split(h, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotated(q, q_norm), rotated(k, k_norm)[:, :, 0]
    return q.reshape(len(x), -1, head_dim), np.concatenate([k, v], -1)


def rope_table(rng, head_dim):
    angle = rng.uniform(0.0, 6.3, (POSITIONS, head_dim // 2))
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


@dataclass(frozen=True)
class Family:
    """A family's choice of heads, bias and norms."""

    name: str
    head_dim: int
    heads: int
    kv_heads: int
    bias: bool = False
    norm: bool = False
    zero_centered: bool = False

    def operands(self, rng: np.random.Generator, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and statics of attn.prep."""
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        args = (
            ill_conditioned(rng, rows, width),
            ill_conditioned(rng, width) if self.bias else None,
            ill_conditioned(rng, self.head_dim) if self.norm else None,
            ill_conditioned(rng, self.head_dim) if self.norm else None,
            rope_table(rng, self.head_dim),
            rng.integers(0, POSITIONS, rows).astype(np.int32),
        )
        statics = {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "eps": 1e-6}
        return args, {**statics, "zero_centered": self.zero_centered}


FAMILIES = (
    Family("llama", 64, 3, 1),
    Family("qwen3", 128, 4, 2, norm=True),
    Family("all, zero_centered", 64, 6, 2, bias=True, norm=True, zero_centered=True),
)


@prep.gate_cases
def cases(rng, rows):
    return [Case(f.name, *f.operands(rng, rows), _altered, exact) for f in FAMILIES]
