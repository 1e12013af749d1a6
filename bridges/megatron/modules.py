"""Megatron modules whose arithmetic is a region. They take the place of Megatron's own in any spec, one by one.

Parallel linears are Megatron's, with its parameters, initialisation and checkpoints; only the forward is a region's.
Inside an IsoTransformerLayer they only hold parameters: the whole layer runs as one Program.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from bridges.megatron.rows import RowFinder, rows_for
from bridges.megatron.runtime import norm
from bridges.torch_ops import region_op
from isojax.errors import Unsupported
from isojax.model.config import DenseConfig


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    value = 0.0 if config.layernorm_zero_centered_gamma else 1.0
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight = torch.nn.Parameter(torch.full((size,), value, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  Megatron reduces by this mark
    return weight


class IsoRMSNorm(torch.nn.Module):
    """norms.rms over the last axis; gradients of the weight in fp32 to main_grad."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise Unsupported("norms.rms", f"normalization {config.normalization!r}", "'RMSNorm'", "set normalization")
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = _flat(x)
        n = rows.shape[0]
        padded = rows_for(n, "cpu" if x.device.type == "cpu" else "sm90")
        if padded != n:
            rows = torch.cat([rows, rows.new_zeros(padded - n, rows.shape[1])])
        return norm(self.eps, self.zero_centered)(rows, self.weight)[:n].reshape(x.shape)


class _OneRank:
    """What the parallel linears may not be asked for yet: no weight is split, no activation gathered."""

    def _check(self, name: str, bias: torch.Tensor | None) -> None:
        if self.tp_group.size() != 1:  # type: ignore[attr-defined]
            raise Unsupported(name, f"tensor parallel {self.tp_group.size()}", "1", "set tensor_model_parallel_size=1")  # type: ignore[attr-defined]
        if bias is not None:
            raise Unsupported(name, "a bias", "none, except q/k/v's inside IsoTransformerLayer", "use bias=False")


class IsoColumnParallelLinear(_OneRank, ColumnParallelLinear):
    """linear.column over Megatron's weight [out, in]."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, bias: Any = None, **_: Any) -> torch.Tensor:
        self._check("linear.column", bias)
        return region_op("linear.column")(_flat(input), weight).reshape(*input.shape[:-1], weight.shape[0])


class IsoLayerNormColumnParallelLinear(IsoColumnParallelLinear):
    """norms.rms, then linear.column: TE's shape of it, with the norm's weight as `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps, self.zero_centered = config.layernorm_epsilon, config.layernorm_zero_centered_gamma
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rms = region_op("norms.rms")
        y = rms(_flat(input_), self.layer_norm_weight, eps=self.eps, zero_centered=self.zero_centered)
        return super().forward(y.reshape(input_.shape), *args, **kwargs)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},
            sharded_offsets,
            tp_group=self.tp_group,  # type: ignore[arg-type]
            dp_cp_group=metadata["dp_cp_group"],
        )


class IsoRowParallelLinear(_OneRank, RowParallelLinear):
    """linear.row over Megatron's weight [out, in]: leaves and tree, so that later degrees keep the bits."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, bias: Any = None, **_: Any) -> torch.Tensor:
        self._check("linear.row", bias)
        return region_op("linear.row")(_flat(input), weight).reshape(*input.shape[:-1], weight.shape[0])


class IsoSwiGLU(torch.nn.Module):
    """mlp.swiglu over [.., 2F], gate then up. Set config.use_te_activation_func, with or without TE."""

    def __init__(self, *, config: TransformerConfig):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return region_op("mlp.swiglu")(_flat(x)).reshape(*x.shape[:-1], x.shape[-1] // 2)


class IsoCoreAttention(torch.nn.Module):
    """attn.core over q [S, B, Hq, D], k and v [S, B, Hkv, D], prepared by the caller -> [S, B, Hq * D]."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__()
        d, heads, groups = config.kv_channels, config.num_attention_heads, config.num_query_groups
        assert d is not None and groups is not None  # TransformerConfig fills them in
        self.scale = softmax_scale if softmax_scale is not None else d**-0.5
        self.arch = "sm90" if torch.cuda.is_available() else "cpu"
        # Only group, head size and positions are read; positions are the caller's, so nothing bounds them here.
        shape = DenseConfig("llama", 1, 1, 1, 1, heads, groups, d, 0.0, 1 << 20, True)
        self.rows = RowFinder(shape, self.arch, rope=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        if attention_bias is not None:
            raise Unsupported("attn.core", "an attention bias", "none", "use a model without one")
        thd = query.dim() == 3
        q, k, v = (x[:, None] if thd else x for x in (query, key, value))
        rows = self.rows.find(tuple(q.shape[:2]), q.device, attention_mask, None, packed_seq_params)
        kv = torch.cat([rows.pack(k), rows.pack(v)], -1)
        b = rows.batch
        out = region_op("attn.core")(rows.pack(q), kv, None, b.cu_q, b.lens, b.work, scale=self.scale, tile=b.tile)
        out = rows.unpack(out)
        return out[:, 0] if thd else out
