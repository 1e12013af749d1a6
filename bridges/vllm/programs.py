"""The model's Programs, traced and compiled for torch once per bucket of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridges.torch_ops import Compiled, compile_program, prepare
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
        self._ones: dict[int, torch.Tensor] = {}
        self._room: dict[Any, torch.Tensor] = {}  # of `_padded`

    # -- hidden states ----------------------------------------------------------------------------------------------
    def trace_hidden(self, a: Arrays, cache: Sequence[int]) -> program.Program:
        """The Program of a bucket and kind of step over caches of shape [blocks, block, Hkv, 2 D]."""
        c = self.config
        index = {name: _int(*getattr(a, name).shape) for name in a._fields if name not in ("tokens", "tile")}
        batch = dense.Batch(rope=_float(*self.rope.shape), tile=a.tile, **index)
        caches = [jax.ShapeDtypeStruct(tuple(cache), jnp.dtype(c.dtype)) for _ in range(c.layers)]

        def hidden(params: Any, tokens: Any, batch: Any, caches: Any) -> Any:
            return dense.bind(self.graph, params).hidden(tokens, batch, caches)

        return program.trace(hidden, self.specs, _int(len(a.tokens)), batch, caches)

    def hidden(self, tokens: torch.Tensor, a: Arrays, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Final hidden states [T, D]; writes this step's keys and values into `caches`."""
        run = self._hidden(a, tuple(caches[0].shape))
        return run(*self.flat, tokens, *a[1:5], self.rope, *a[5:7], *caches)[0]

    def _hidden(self, a: Arrays, cache: tuple[int, ...]) -> Compiled:
        key = ("hidden", len(a.tokens), a.tile, cache)
        return self._get(key, lambda: self.trace_hidden(a, cache), self.config.layers)

    # -- the head ---------------------------------------------------------------------------------------------------
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [n, V] of n rows."""
        return self._rows("logits", hidden, self.head)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [n, V] over the whole vocabulary at temperature 1."""
        t = batches.bucket(len(logits), self.arch)
        if t not in self._ones:
            self._ones[t] = torch.ones(t, device=logits.device)
        return self._rows("logprobs", logits, self._ones[t])

    def _trace_head(self, name: str, t: int) -> program.Program:
        c = self.config
        if name == "logits":
            specs = [jax.ShapeDtypeStruct(s, jnp.dtype(c.dtype)) for s in ((t, c.hidden), (c.vocab, c.hidden))]
            return program.trace(lambda h, w: head.logits(h, w), *specs)
        return program.trace(lambda z, inverse: head.logprob_rows(z, inverse), _float(t, c.vocab), _float(t))

    def _rows(self, name: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        n = len(x)
        t = batches.bucket(n, self.arch)
        run = self._get((name, t), lambda: self._trace_head(name, t))
        return run(self._padded(x, t), other)[0][:n]

    def _padded(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """x with `rows` rows: those that follow it in its own memory where there are enough, else in a kept buffer.

        Rows are independent, so whatever numbers lie in the padding change nothing.
        """
        if len(x) == rows:
            return x
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        if x.is_contiguous() and room >= rows * x.shape[1]:
            return x.as_strided((rows, x.shape[1]), x.stride())
        key = rows, x.shape[1], x.dtype
        if key not in self._room:
            with torch.inference_mode(False):  # so that it may be written outside of it too
                self._room[key] = torch.zeros(key[:2], dtype=x.dtype, device=x.device)
        self._room[key][: len(x)] = x
        return self._room[key]

    # -- compiling --------------------------------------------------------------------------------------------------
    def prepare(self, steps: Iterable[tuple[int, bool]], sampled: int, cache: Sequence[int]) -> None:
        """Compile what an engine will run: (rows, decode) steps, and the head for up to `sampled` rows.

        cache: the shape of a layer's paged cache. The kernels of all Programs are compiled together.
        """
        shape, layers = tuple(cache), self.config.layers
        wanted: dict[Any, tuple[Callable[[], program.Program], int]] = {}
        for rows, decode in steps:
            a = self.step.arrays(rows, decode)
            wanted["hidden", len(a.tokens), a.tile, shape] = lambda a=a: self.trace_hidden(a, shape), layers
        for t in batches.buckets(batches.bucket(sampled, self.arch), self.arch):
            for name in ("logits", "logprobs"):
                wanted[name, t] = lambda name=name, t=t: self._trace_head(name, t), 0
        traced = {key: trace() for key, (trace, _) in wanted.items() if key not in self._compiled}
        prepare(list(traced.values()), self.arch, self.rope.device)
        for key, found in traced.items():
            self._get(key, lambda found=found: found, wanted[key][1])

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
        used = set(self.trace_hidden(self.step.arrays(1), one).regions())
        return sorted(used | {"head.logits", "head.logprob_rows"})
