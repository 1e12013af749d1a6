"""score and generate in plain JAX: whole sequences, or a paged cache step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from isojax import batch as batches
from isojax.model import dense, rope, weights
from isojax.model.config import DenseConfig
from isojax.pallas_kernels import head
from isojax.runtime.pool import Pool

PAGE = 16


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph: Any, state: Any, hidden: Any) -> Any:
    return nnx.merge(graph, state).logits(hidden)


class Reference:
    """A model with its weights on JAX's default device.

    ref = Reference.load("path/to/checkpoint")
    rows = ref.score([[1, 2, 3]])          # full-vocabulary log-probabilities, one array per sequence
    tokens, logprobs = ref.generate([[1, 2, 3]], 16)
    """

    def __init__(self, config: DenseConfig, params: dict[str, Any]):
        self.config = config
        device = jax.devices()[0]
        self.arch = "sm90" if device.platform == "gpu" else "cpu"
        graph, _ = dense.abstract(config)
        # placed explicitly: arrays imported from torch stay on the host, and would keep the computation there
        self.model = dense.bind(graph, {k: jax.device_put(v, device) for k, v in params.items()})
        self.rope = jax.device_put(rope.table(config.rope, config.head_dim, config.positions), device)

    @classmethod
    def load(cls, path: str | Path, dtype: str = "bfloat16") -> Reference:
        """Raises: CheckpointError, ConfigError."""
        config, params = weights.load(path, dtype)
        return cls(config, weights.as_jax(params))

    # -- whole sequences ------------------------------------------------------------------------------------------
    def hidden(self, sequences: Sequence[Sequence[int]]) -> Any:
        """Final hidden states [T, D] of packed sequences; rows past the last token are padding."""
        batches.check_tokens(sequences, self.config.vocab, self.config.positions)
        b = batches.packed([len(s) for s in sequences], self.config.group, self.arch, self.rope)
        tokens = batches.pad(np.concatenate([np.asarray(s, np.int32) for s in sequences]), len(b.positions))
        return self.model.hidden(jnp.asarray(tokens), b)[0]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probabilities over the whole vocabulary after each token: [len, V] float32 per sequence."""
        rows = self._log_probabilities(self._logits(self.hidden(sequences)), temperature)
        return np.split(rows[: sum(map(len, sequences))], np.cumsum([len(s) for s in sequences])[:-1])

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of every token but the first, by the trainer's head: [len - 1] float32 per sequence."""
        hidden = self.hidden(sequences)
        targets = np.concatenate([np.asarray([*s[1:], 0], np.int32) for s in sequences])
        t = hidden.shape[0]
        inverse = jnp.full((t,), np.float32(1.0) / np.float32(temperature), jnp.float32)
        out = np.asarray(jax.jit(head.logprob)(hidden, self.model.head_weight, batches.pad(targets, t), inverse))
        parts = np.split(out[: len(targets)], np.cumsum([len(s) for s in sequences])[:-1])
        return [p[:-1] for p in parts]

    def _logits(self, hidden: Any) -> Any:
        return _logits(*nnx.split(self.model), hidden)

    def _log_probabilities(self, logits: Any, temperature: float) -> np.ndarray:
        inverse = jnp.full((logits.shape[0],), np.float32(1.0) / np.float32(temperature), jnp.float32)
        return np.asarray(jax.jit(head.logprob_rows)(logits, inverse))

    # -- step by step -----------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        stop: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Greedy continuation with a paged cache; ties go to the lowest token id.

        Returns the new tokens of each prompt and their log-probabilities over the whole vocabulary, [n, V] float32.
        Raises: InputError for an empty or too long prompt or a token id out of range.
        """
        c = self.config
        batches.check_tokens(prompts, c.vocab, c.positions - max_tokens)
        width = -(-(max(map(len, prompts)) + max_tokens) // PAGE)
        pages = 1 + len(prompts) * width
        pool = Pool(pages, PAGE)
        shape = (pages, PAGE, c.kv_heads, 2 * c.head_dim)
        caches = [jnp.zeros(shape, jnp.dtype(c.dtype)) for _ in range(c.layers)]
        tokens = [list(map(int, p)) for p in prompts]
        fresh = [list(t) for t in tokens]
        rows: list[list[np.ndarray]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        for step in range(max_tokens):
            table = np.zeros((len(live), width), np.int32)
            for i, r in enumerate(live):
                owned = pool.grow(r, len(tokens[r]))
                table[i, : len(owned)] = owned
            query, context = [len(fresh[r]) for r in live], [len(tokens[r]) for r in live]
            b = batches.paged(query, context, table, PAGE, c.group, self.arch, self.rope)
            flat = batches.pad(np.concatenate([np.asarray(fresh[r], np.int32) for r in live]), len(b.positions))
            hidden, caches = self.model.hidden(jnp.asarray(flat), b, caches)
            last = np.cumsum(query) - 1
            ends = batches.pad(last.astype(np.int32), batches.bucket(len(live), self.arch))
            logits = self._logits(hidden[ends])
            logprobs, chosen = self._log_probabilities(logits, 1.0), np.argmax(np.asarray(logits), 1)
            for i, r in enumerate(live):
                fresh[r] = [
                    int(chosen[i])
                ]  # by logits, as an engine chooses: log-probabilities may tie where they do not
                tokens[r] += fresh[r]
                rows[r].append(logprobs[i])
            for r in [r for r in live if fresh[r][0] == stop]:
                pool.release(r)
                live.remove(r)
            if progress:
                progress(step + 1)
            if not live:
                break
        new = [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
        return new, [np.stack(r) for r in rows]
