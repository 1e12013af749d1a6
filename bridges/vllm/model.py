"""IsoForCausalLM: the model class that vLLM builds, loads and calls. All arithmetic is in its Programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from bridges.vllm import supported
from bridges.vllm.layer import IsoAttention
from bridges.vllm.programs import Programs
from bridges.vllm.step import Arrays, Step
from isojax import batch as batches
from isojax.errors import CheckpointError, Unavailable
from isojax.model import dense, layout, rope
from isojax.model.config import from_hf
from isojax.model.weights import DTYPES


class IsoForCausalLM(nn.Module):
    """Llama, Qwen2 or Qwen3 as one Program per bucket of rows, over vLLM's paged cache.

    Attributes: `forwards` counts the steps computed by Python (a replayed CUDA graph does not come here).
    Raises, when built: ConfigError for a checkpoint or vLLM option that is not supported.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        device = torch.device(vllm_config.device_config.device or "cpu")
        self.arch = "sm90" if device.type == "cuda" else "cpu"
        supported.check(vllm_config, self.arch)
        c = self.iso_config = from_hf(model.hf_config, str(model.dtype).removeprefix("torch."))
        supported.check_length(model.max_model_len, c.positions)

        self.weights = nn.Module()
        params = {name: _parameter(self.weights, name, s.shape, c.dtype) for name, s in dense.abstract(c)[1].items()}
        # vLLM's dummy batches may be longer than any request: give their block tables room too
        rows, block = scheduler.max_num_batched_tokens, vllm_config.cache_config.block_size
        blocks = -(-max(model.max_model_len, rows) // block)
        step = self.step = Step(self.arch, c.group, rows, scheduler.max_num_seqs, blocks, device)
        angles = torch.from_numpy(rope.table(c.rope, c.head_dim, model.max_model_len)).to(device)
        self.programs = Programs(c, params, angles, step, self.arch)
        # constants on the GPU: vLLM's deep sleep discards all that a model made, and wakes parameters and buffers
        self.register_buffer("rope_table", angles, persistent=False)
        self.register_buffer("no_slot", step.no_slot, persistent=False)
        names = [f"{prefix + '.' if prefix else ''}model.layers.{i}.attn" for i in range(c.layers)]
        self.attention = [IsoAttention(n, c, DTYPES[c.dtype], step, vllm_config) for n in names]
        self._params, self._written, self._block, self._scratch = params, set[str](), block, None
        self.sampler: Any = None
        self.forwards = 0

    # -- weights ----------------------------------------------------------------------------------------------------
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take Hugging Face tensors into the packed parameters; a later call may bring any part of them anew.

        Raises: CheckpointError for an unknown name, a wrong shape, or tensors that never came.
        """
        dtype = DTYPES[self.iso_config.dtype]
        self._written |= layout.load_into(self._params, ((n, w.to(dtype)) for n, w in weights), self.iso_config)
        absent = layout.missing(self._written, self.iso_config)
        if absent:
            raise CheckpointError(f"the checkpoint lacks {len(absent)} tensors, the first is {absent[0]}; complete it")
        return {name for name, _ in self.named_parameters()}

    @staticmethod
    def get_model_state_cls() -> type:
        """What vLLM's V2 model runner asks for; imported where it is asked, since that runner needs Triton and CUDA."""
        from bridges.vllm.v2 import IsoModelState

        return IsoModelState

    # -- a step -----------------------------------------------------------------------------------------------------
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise Unavailable("IsoForCausalLM embeds inside its Program; send token ids, not embeddings")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Normalised hidden states [n, D] of the n rows that vLLM scheduled (its padding included)."""
        del positions, kwargs  # the metadata has them
        if input_ids is None or inputs_embeds is not None or intermediate_tensors is not None:
            raise Unavailable("IsoForCausalLM takes token ids only")
        self.forwards += 1
        n = len(input_ids)
        arrays, caches = self._arrays(n)
        if len(arrays.tokens) == n and input_ids.dtype == torch.int32:
            tokens = input_ids
        else:
            tokens = arrays.tokens
            tokens[:n].copy_(input_ids)
            tokens[n:].zero_()
        return self.programs.hidden(tokens, arrays, caches)[:n]

    def _arrays(self, rows: int) -> tuple[Arrays, list[torch.Tensor]]:
        metadata: Any = get_forward_context().attn_metadata
        first = self.attention[0]
        if metadata and first.bound:
            arrays = metadata[first.name].arrays
            if len(arrays.tokens) != batches.bucket(rows, self.arch):
                raise ValueError(f"metadata for {len(arrays.tokens)} rows, but {rows} are run")
            self.step.take(arrays, metadata[first.name].common)
            return arrays, [layer.kv_cache for layer in self.attention]
        return self.step.idle(rows), self._idle_caches()

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Of a layer's paged cache, once vLLM has bound it."""
        return tuple(self.attention[0].kv_cache.shape)

    def _idle_caches(self) -> list[torch.Tensor]:
        """What a run without requests writes into: vLLM's caches, or one block a layer before they exist."""
        if self.attention[0].bound:
            return [layer.kv_cache for layer in self.attention]
        if self._scratch is None:
            c = self.iso_config
            new = lambda: torch.zeros(self.idle_shape, dtype=DTYPES[c.dtype], device=self.step.device)
            self._scratch = [new() for _ in range(c.layers)]
        return self._scratch

    @property
    def idle_shape(self) -> tuple[int, ...]:
        """Of what stands for a layer's cache before there is one: a single block."""
        return 1, self._block, self.iso_config.kv_heads, 2 * self.iso_config.head_dim

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """fp32 logits [n, V], not rounded. Raises Unavailable where the log-probabilities would be vLLM's own."""
        if self.sampler is None:
            raise Unavailable(
                "IsoForCausalLM runs with its own sampler, and this engine has vLLM's; "
                "start it with worker_cls='bridges.vllm.worker.IsoWorker' (bridges.vllm.engine_args does)"
            )
        return self.programs.logits(hidden_states)


def _parameter(root: nn.Module, name: str, shape: Any, dtype: str) -> nn.Parameter:
    """An uninitialised parameter at a dotted name below `root`, on torch's default device."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    p = nn.Parameter(torch.empty(tuple(shape), dtype=DTYPES[dtype]), requires_grad=False)
    root.register_parameter(leaf, p)
    return p


__all__ = ["IsoForCausalLM"]
