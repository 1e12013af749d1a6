"""The trainer's log-probabilities against the engine's form of the same model, bit for bit.

The engine's form: one Program of the whole model, a sequence alone, keys in a paged cache, logits formed, and
head.logprob_rows over the whole vocabulary. It is what vLLM runs, over the trainer's own parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from bridges.megatron import weights
from bridges.megatron.bench.workload import MicroBatch
from bridges.megatron.model import IsoGPTModel
from bridges.torch_ops import compile_program
from bridges.torch_ops.compile import prepare
from bridges.torch_ops.dtypes import to_jax
from isojax import batch as batches
from isojax.model import dense
from isojax.pallas_kernels import head
from isojax.program import trace

PAGE = 16
ROWS = 256  # rows whose whole vocabulary is formed at a time


class EngineForm:
    """Some sequences of a micro-batch in the engine's form, compiled when this is made and computed when it is called.

    count: how many, the shortest first.
    """

    def __init__(self, model: IsoGPTModel, batch: MicroBatch, count: int):
        self.model, self.batch = model, batch
        self.chosen = np.argsort([len(s) for s in batch.sequences], kind="stable")[:count]
        self.alone = [_Alone(model, batch.sequences[i]) for i in self.chosen]

    def differing(self, logprobs: torch.Tensor) -> tuple[int, int]:
        """(compared, differing) of [1, T] fp32 log-probabilities, the gradient-carrying forward's."""
        starts = np.cumsum([0, *map(len, self.batch.sequences)])
        compared = wrong = 0
        for i, alone in zip(self.chosen, self.alone, strict=True):
            theirs = alone.logprobs()
            ours = logprobs.detach()[0, starts[i] : starts[i] + len(theirs)].contiguous()
            compared += len(theirs)
            wrong += int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())
        return compared, wrong


class _Alone:
    """One sequence in a paged cache of its own."""

    def __init__(self, model: IsoGPTModel, tokens: Sequence[int]):
        self.model, self.tokens = model, tokens
        c, arch, device = model.runtime.config, model.runtime.arch, model.head_weight.device
        pages = -(-len(tokens) // PAGE)
        table = 1 + np.arange(pages, dtype=np.int32)[None]
        b = batches.paged([len(tokens)], [len(tokens)], table, PAGE, c.group, arch, None)
        there = lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(device)
        arrays = {name: there(getattr(b, name)) for name in ("positions", "cu_q", "lens", "work", "table", "slots")}
        self.step = dense.Batch(rope=model.runtime.rows.rope_table(device), tile=b.tile, **arrays)
        self.ids = there(batches.pad(np.asarray(tokens, np.int32), len(b.positions)))
        self.cache = (pages + 1, PAGE, c.kv_heads, 2 * c.head_dim)
        graph, _ = dense.abstract(c)

        def hidden(params: Any, ids: Any, step: Any, caches: Any) -> Any:
            return dense.bind(graph, params).hidden(ids, step, caches)[0]

        meta = lambda *shape, dtype=model.head_weight.dtype: torch.empty(shape, dtype=dtype, device="meta")
        rows, ones = meta(ROWS, c.hidden), meta(ROWS, dtype=torch.float32)
        caches = [meta(*self.cache)] * c.layers
        traced = [
            trace(hidden, *_specs(weights.packed(model, c), self.ids, self.step, caches)),
            trace(_whole_rows, *_specs(rows, model.head_weight, ones)),
        ]
        prepare(traced, arch, device)
        self.hidden, self.whole_rows = (compile_program(p, arch=arch, device=device) for p in traced)

    @torch.no_grad()
    def logprobs(self) -> torch.Tensor:
        """Log-probability of every token but the first, [n - 1] fp32."""
        weight = self.model.head_weight.detach()
        caches = [weight.new_zeros(self.cache) for _ in range(self.model.runtime.config.layers)]
        params = weights.packed(self.model, self.model.runtime.config)
        h = self.hidden(*jax.tree.leaves((params, self.ids, self.step, caches)))[0]
        ones, out = torch.ones(ROWS, device=h.device), []
        for at in range(0, len(self.tokens) - 1, ROWS):
            target = torch.tensor(self.tokens[at + 1 : at + 1 + ROWS], device=h.device)
            rows = h.new_zeros(ROWS, h.shape[1])
            rows[: len(target)] = h[at : at + len(target)]
            full = self.whole_rows(rows, weight, ones)[0]
            out.append(full[: len(target)].gather(1, target[:, None])[:, 0])
        return torch.cat(out)


def _whole_rows(h: Any, w: Any, inverse: Any) -> Any:
    return head.logprob_rows(head.logits(h, w), inverse)


def _specs(*args: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(x.shape), to_jax(x.dtype)), args)
