"""A dense decoder for Llama, Qwen2 and Qwen3: regions and data movement, nothing else.

Every runtime runs this code: jax.jit calls it (isojax.runtime), vLLM and Megatron run its traced Programs (bridges).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from isojax.model.config import DenseConfig
from isojax.pallas_kernels import attn, embed, head, linear, mlp, norms, residual
from isojax.program import fan, put


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "cu_q", "lens", "work", "rope", "table", "slots"],
    meta_fields=["tile"],
)
@dataclass(frozen=True)
class Batch:
    """Where the T rows of a step belong. isojax.batch makes one; T is a bucket, true counts are in the arrays.

    positions [T]; cu_q [R+1], lens [R], work [W, 2]: see attn.core; rope [P, D] float32.
    table [R, M], slots [T]: block table, and the cache slot that each row writes; None where keys are the batch's own.
    """

    positions: Any
    cu_q: Any
    lens: Any
    work: Any
    rope: Any
    table: Any = None
    slots: Any = None
    tile: int = 16


def _param(config: DenseConfig, *shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, jnp.dtype(config.dtype)))


class Layer(nnx.Module):
    """One decoder layer. Parameters are packed: qkv in grouped order, gate over up (isojax.model.layout)."""

    def __init__(self, config: DenseConfig):
        c = self.config = config
        self.input_norm = _param(c, c.hidden)
        self.qkv = _param(c, c.qkv_width, c.hidden)
        self.qkv_bias = _param(c, c.qkv_width) if c.qkv_bias else None
        self.q_norm = _param(c, c.head_dim) if c.qk_norm else None
        self.k_norm = _param(c, c.head_dim) if c.qk_norm else None
        self.o = _param(c, c.hidden, c.heads * c.head_dim)
        self.post_norm = _param(c, c.hidden)
        self.gate_up = _param(c, 2 * c.intermediate, c.hidden)
        self.down = _param(c, c.hidden, c.intermediate)

    def __call__(
        self,
        x: Float[Array, "T D"],
        delta: Float[Array, "T D"] | None,
        batch: Batch,
        cache: Float[Array, "N B Hkv 2D"] | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Any]:
        """(x, delta): the residual stream and what is still to be added to it (None at the first layer)."""
        c = self.config
        norm = dict(eps=c.eps, zero_centered=c.zero_centered)
        if delta is None:
            x, again = fan(x, 2)
            y = norms.rms(again, self.input_norm[...], **norm)
        else:
            x, y = norms.add_rms(x, delta, self.input_norm[...], **norm)
        attended, cache = self.attend(linear.column(y, self.qkv[...]), batch, cache)
        x, y = norms.add_rms(x, linear.row(attended, self.o[...]), self.post_norm[...], **norm)
        return x, linear.row(mlp.swiglu(linear.column(y, self.gate_up[...])), self.down[...]), cache

    def attend(self, qkv: Float[Array, "T W"], batch: Batch, cache: Any) -> tuple[Float[Array, "T HD"], Any]:
        c = self.config
        optional = (p if p is None else p[...] for p in (self.qkv_bias, self.q_norm, self.k_norm))
        q, kv = attn.prep(
            qkv,
            *optional,
            batch.rope,
            batch.positions,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            eps=c.eps if c.qk_norm else 0.0,
            zero_centered=c.zero_centered,
        )
        if cache is not None:
            slots = cache.reshape(-1, *cache.shape[2:])
            kv = cache = put(slots, batch.slots, kv).reshape(cache.shape)
        out = attn.core(q, kv, batch.table, batch.cu_q, batch.lens, batch.work, scale=c.scale, tile=batch.tile)
        return out, cache

    def boundary(self, h: Float[Array, "T D"], batch: Batch) -> Float[Array, "T D"]:
        """The layer between two rounded residual sums: how a trainer cuts the model (recompute, pipeline stages)."""
        x, delta, _ = self(h, None, batch)
        return residual.add(x, delta)


class Dense(nnx.Module):
    """The decoder without its runtime: token ids to final hidden states, and the head."""

    def __init__(self, config: DenseConfig):
        self.config = config
        self.embed = _param(config, config.vocab, config.hidden)
        self.layers = nnx.List([Layer(config) for _ in range(config.layers)])
        self.norm = _param(config, config.hidden)
        self.head = None if config.tied else _param(config, config.vocab, config.hidden)

    @property
    def head_weight(self) -> Float[Array, "V D"]:
        return self.embed[...] if self.head is None else self.head[...]

    def hidden(self, tokens: Int32[Array, "T"], batch: Batch, caches: Any = None) -> tuple[Float[Array, "T D"], Any]:
        """Normalised final hidden states, and the caches with this step's keys and values written."""
        x, delta, written = embed.lookup(self.embed[...], tokens), None, []
        for i, layer in enumerate(self.layers):
            x, delta, cache = run_layer(layer, x, delta, batch, None if caches is None else caches[i])
            written.append(cache)
        _, y = norms.add_rms(x, delta, self.norm[...], eps=self.config.eps, zero_centered=self.config.zero_centered)
        return y, None if caches is None else written

    def logits(self, hidden: Float[Array, "T D"]) -> Float32[Array, "T V"]:
        return head.logits(hidden, self.head_weight)

    def logprob(
        self,
        hidden: Float[Array, "T D"],
        targets: Int32[Array, "T"],
        inv_temperature: Float32[Array, "T"],
        emit_logits: bool = False,
    ) -> Float32[Array, "T"]:
        return head.logprob(hidden, self.head_weight, targets, inv_temperature, emit_logits=emit_logits)


@functools.partial(jax.jit, static_argnums=0)
def _layer(graph: Any, state: Any, x: Any, delta: Any, batch: Batch, cache: Any) -> Any:
    return nnx.merge(graph, state)(x, delta, batch, cache)


def run_layer(layer: Layer, x: Any, delta: Any, batch: Batch, cache: Any) -> Any:
    """One layer under its own jax.jit: the layers of a model share one trace and one compiled function."""
    return _layer(*nnx.split(layer), x, delta, batch, cache)


def abstract(config: DenseConfig) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """(graph, parameter specs by dotted name) without allocating anything."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Dense(config)))
    return graph, {".".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(state)}


def bind(graph: Any, params: dict[str, Any]) -> Dense:
    """The model over given parameters (arrays or specs by dotted name)."""
    flat = [(tuple(int(p) if p.isdigit() else p for p in k.split(".")), nnx.Param(v)) for k, v in params.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))
