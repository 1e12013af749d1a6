"""The unit that Megatron sees: one transformer layer, residual sum in, residual sum out, as one Program."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from bridges.megatron import config as configs
from bridges.megatron.runtime import Runtime
from bridges.megatron.weights import layer_names
from isojax.errors import Unsupported

_UNREAD = ("context_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin")


class IsoTransformerLayer(TransformerLayer):
    """isojax.model.dense.Layer.boundary over the parameters of a Megatron layer of TE's shape.

    The submodules are built by Megatron from the spec and hold parameters, initialisation, checkpoint layout and hooks;
    their own forwards do not run. Recompute and pipeline boundaries cut where this layer begins and ends.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, runtime: Runtime, **kwargs: Any):
        configs.check(config, runtime.config)
        super().__init__(config, submodules, *args, **kwargs)
        self.runtime = runtime
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        for ours, theirs in layer_names(runtime.config).items():
            path, name = theirs.rsplit(".", 1)
            self._owners[ours] = (self.get_submodule(path), name)

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """The layer's parameters under isojax.model.dense's names."""
        return {ours: getattr(module, name) for ours, (module, name) in self._owners.items()}

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        padding_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [S, B, D] -> (the same shape, None). Masks: see RowFinder.find.

        Rotary embeddings that Megatron made are not read: positions come from the sequences.
        """
        for name, value in others.items():
            if value is not None and name not in _UNREAD:
                raise Unsupported("IsoTransformerLayer", name, "None", "generate with the engine; this layer trains")
        for module, _ in self._owners.values():
            run_pre_hooks(module)
        shape = tuple(hidden_states.shape[:2])
        rows = self.runtime.rows.find(shape, hidden_states.device, attention_mask, padding_mask, packed_seq_params)
        out = self.runtime.layer(rows.pack(hidden_states), self.weights(), rows.batch)
        return rows.unpack(out), None


def run_pre_hooks(module: torch.nn.Module) -> None:
    """Run the hooks that expect `module`'s forward, which does not run: DDP waits there for gathered parameters."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
