"""The model's Programs, traced and compiled for torch once per bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridges.torch_ops import Compiled, compile_program
from bridges.vllm.step import Arrays, Step
from isojax import batch as batches
from isojax import program
from isojax.model import dense
from isojax.model.config import DenseConfig
from isojax.pallas_kernels import head


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Programs:
    """Hidden states, logits and log-probabilities of one model with its weights.

    params: packed parameters by dotted name; rope: [positions, D] float32. Both stay where they are: they are passed to
    every call, so that weights written in place are seen by the next step.
    """

    def __init__(
        self, config: DenseConfig, params: Mapping[str, torch.Tensor], rope: torch.Tensor, step: Step, arch: str
    ):
        self.config, self.step, self.arch, self.rope = config, step, arch, rope
        self.graph, self.specs = dense.abstract(config)
        self.flat = [params[name] for name in sorted(self.specs)]  # JAX flattens a dict in the order of its keys
        self.head = params["embed" if config.tied else "head"]
        self._compiled: dict[Any, Compiled] = {}

    # -- hidden states ----------------------------------------------------------------------------------------------
    def trace_hidden(self, rows: int, cache: Sequence[int]) -> program.Program:
        """The Program of a bucket over caches of shape [blocks, block, Hkv, 2 D]."""
        c, a = self.config, self.step.arrays(rows)
        index = {name: _int(*getattr(a, name).shape) for name in a._fields if name != "tokens"}
        batch = dense.Batch(rope=_float(*self.rope.shape), tile=self.step.tile, **index)
        caches = [jax.ShapeDtypeStruct(tuple(cache), jnp.dtype(c.dtype)) for _ in range(c.layers)]

        def hidden(params: Any, tokens: Any, batch: Any, caches: Any) -> Any:
            return dense.bind(self.graph, params).hidden(tokens, batch, caches)

        return program.trace(hidden, self.specs, _int(len(a.tokens)), batch, caches)

    def hidden(self, tokens: torch.Tensor, a: Arrays, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Final hidden states [T, D]; writes this step's keys and values into `caches`."""
        shape = tuple(caches[0].shape)
        run = self._get(("hidden", len(tokens), shape), lambda: self.trace_hidden(len(tokens), shape), len(caches))
        return run(*self.flat, tokens, *a[1:5], self.rope, *a[5:], *caches)[0]

    # -- the head ---------------------------------------------------------------------------------------------------
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [n, V] of n rows."""

        def trace(t: int) -> program.Program:
            c = self.config
            specs = [jax.ShapeDtypeStruct(s, jnp.dtype(c.dtype)) for s in ((t, c.hidden), (c.vocab, c.hidden))]
            return program.trace(lambda h, w: head.logits(h, w), *specs)

        return self._rows("logits", trace, hidden, lambda t: self.head)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [n, V] over the whole vocabulary at temperature 1."""

        def trace(t: int) -> program.Program:
            specs = _float(t, self.config.vocab), _float(t)
            return program.trace(lambda z, inverse: head.logprob_rows(z, inverse), *specs)

        return self._rows("logprobs", trace, logits, lambda t: torch.ones(t, device=logits.device))

    def _rows(
        self, name: str, trace: Callable[[int], Any], x: torch.Tensor, other: Callable[[int], torch.Tensor]
    ) -> torch.Tensor:
        n = len(x)
        t = batches.bucket(n, self.arch)
        if t != n:
            x = torch.nn.functional.pad(x, (0, 0, 0, t - n))
        return self._get((name, t), lambda: trace(t))(x, other(t))[0][:n]

    # -- compiling --------------------------------------------------------------------------------------------------
    def _get(self, key: Any, trace: Callable[[], program.Program], donated: int = 0) -> Compiled:
        if key not in self._compiled:
            traced = trace()
            last = len(traced.inputs)
            donate = tuple(range(last - donated, last))
            self._compiled[key] = compile_program(traced, arch=self.arch, donate=donate, device=self.rope.device)
        return self._compiled[key]

    def regions(self) -> list[str]:
        """Every region that a step can call, head included."""
        one = [1, 16, self.config.kv_heads, 2 * self.config.head_dim]
        used = set(self.trace_hidden(1, one).regions())
        return sorted(used | {"head.logits", "head.logprob_rows"})
