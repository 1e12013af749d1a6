"""Runs requests through a real engine, and what JAX says about the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridges.vllm.tap import by_request, digest

LENGTHS = (5, 17, 33, 64, 3, 100, 16, 40)
NEW = 12


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 0, vocab: int = 512) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, vocab, n).tolist() for n in lengths]


@dataclass
class Answer:
    """One request: its new tokens, their log-probabilities, digests of full rows by position, cached prompt tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: dict[int, str] = field(default_factory=dict)
    cached: int = 0
    prompt_logprobs: list[Any] | None = None


class Engine:
    """An in-process `LLM` with its tap on."""

    def __init__(self, llm: Any):
        self.llm, self.engine = llm, llm.llm_engine
        self._run = itertools.count()
        llm.collective_rpc("iso_tap", args=("digest",))

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def count(self, metric: str) -> float:
        """Sum of one of vLLM's counters."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == metric)

    def run(
        self, asked: Mapping[int, Sequence[int]], new: int = NEW, arrive: Mapping[int, int] | None = None, **params: Any
    ) -> dict[int, Answer]:
        """Greedy answers to prompts by key. arrive: the engine step at which a key's request is added (0)."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, **params)
        run, waiting, step = next(self._run), dict(asked), 0
        answers: dict[int, Answer] = {}
        while waiting or self.engine.has_unfinished_requests():
            for key in [k for k in waiting if (arrive or {}).get(k, 0) <= step]:
                self.engine.add_request(f"{run}.{key}", {"prompt_token_ids": list(waiting.pop(key))}, greedy)
            for out in self.engine.step():
                if out.finished:
                    answers[int(out.request_id.partition(".")[2])] = _answer(out)
            step += 1
        for request, rows in by_request(self.llm.collective_rpc("iso_take")[0]).items():
            answers[int(request.partition(".")[2])].rows = rows
        return answers


def _answer(out: Any) -> Answer:
    only = out.outputs[0]
    logprobs = [entry[t].logprob for t, entry in zip(only.token_ids, only.logprobs, strict=True)]
    return Answer(list(only.token_ids), logprobs, {}, out.num_cached_tokens or 0, out.prompt_logprobs)


class Oracle:
    """isojax.runtime.Reference on the same checkpoint."""

    def __init__(self, path: Path):
        from isojax.runtime import Reference

        self.reference = Reference.load(path)

    def answers(self, asked: Mapping[int, Sequence[int]], new: int = NEW) -> dict[int, Answer]:
        """Tokens by its own paged cache, and rows of every position by scoring the whole sequences at once."""
        tokens, _ = self.reference.generate(list(asked.values()), new)
        scored = self.reference.score([[*p, *t] for p, t in zip(asked.values(), tokens, strict=True)])
        out = {}
        for key, prompt, got, rows in zip(asked, asked.values(), tokens, scored, strict=True):
            at = range(len(prompt) - 1, len(prompt) - 1 + new)
            logprobs = [float(rows[i][t]) for i, t in zip(at, got, strict=True)]
            out[key] = Answer(got, logprobs, {i: digest(row) for i, row in enumerate(rows)})
        return out


def check(got: Mapping[int, Answer], want: Mapping[int, Answer], asked: Mapping[int, Sequence[int]]) -> int:
    """Equal tokens, log-probabilities and full rows, for every request; returns how many rows were compared."""
    assert set(got) == set(asked)
    compared = 0
    for key, prompt in asked.items():
        a, w = got[key], want[key]
        assert a.tokens == w.tokens, f"request {key} has other tokens"
        assert a.logprobs == w.logprobs, f"request {key} has other log-probabilities"  # floats: fp32 values, exactly
        last = len(prompt) - 1
        assert set(range(last, last + len(a.tokens))) <= set(a.rows), f"request {key} lacks rows"
        wrong = [p for p, row in a.rows.items() if row != w.rows[p]]
        assert not wrong, f"request {key} differs from JAX at positions {wrong}"
        compared += len(a.rows)
    return compared
