"""Where a trainer's step goes, region by region: each region call of a real step timed in place, beside its floor."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bridges.megatron.runtime import Runtime
from bridges.torch_ops import Compiled
from isojax.program import Step, call_key

Event = tuple[Any, Any]


class Budget:
    """Times of the region calls of one Runtime's compiled Programs; a context manager around the steps to be timed.

    bandwidth: bytes per us of a copy. rate: flops per us of torch.mm. pairs: query-key pairs of the micro-batch.
    """

    def __init__(self, runtime: Runtime, bandwidth: float, rate: float, pairs: float):
        self.runtime, self.bandwidth, self.rate, self.pairs = runtime, bandwidth, rate, pairs
        self.events: dict[Any, list[Event]] = defaultdict(list)
        self.steps: dict[Any, Step] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        undo = []
        for call in self.runtime.calls:
            for compiled in call.both_ways():
                undo += self._instrument(compiled)
        try:
            yield
        finally:
            for scope, name, fn in undo:
                scope[name] = fn

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """One row for each distinct region call, the costliest first. steps: how many were timed."""
        torch.cuda.synchronize()
        out = []
        for key, events in self.events.items():
            step = self.steps[key]
            total = sum(a.elapsed_time(b) for a, b in events) / steps
            each = total * 1e3 * steps / len(events)
            floor = max(moved(step) / self.bandwidth, flops(step, self.pairs) / self.rate)
            shapes = " ".join("x".join(map(str, a.shape)) for a in step.in_avals[:2])
            out.append(
                dict(
                    region=step.name,
                    operands=shapes,
                    calls=len(events) // steps,
                    us=round(each, 1),
                    floor_us=round(floor, 1),
                    ms_a_step=round(total, 3),
                )
            )
        return sorted(out, key=lambda r: -r["ms_a_step"])

    def _instrument(self, compiled: Compiled) -> list[tuple[dict[str, Any], str, Any]]:
        scope, undo = compiled._run.__globals__, []
        for k, step in enumerate(compiled.program.steps):
            if step.kind == "region":
                key = call_key(step)
                self.steps[key] = step
                undo.append((scope, f"f{k}", scope[f"f{k}"]))
                scope[f"f{k}"] = self._timed(self.events[key], scope[f"f{k}"])
        return undo

    @staticmethod
    def _timed(events: list[Event], fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            out = fn(*args)
            b.record()
            events.append((a, b))
            return out

        return run


def moved(step: Step) -> int:
    """Bytes that a region call moves at least: operands and outputs once; of a table only the rows that are read."""
    avals: Sequence[Any] = [*step.in_avals, *step.out_avals]
    if step.name == "embed.lookup":
        avals = [*step.in_avals[1:], *step.out_avals * 2]
    if step.name in ("attn.prep", "attn.prep_bwd"):
        avals = [a for a in avals if str(a.dtype) != "float32"]  # of the rotary table a few rows, often
    return sum(a.size * a.dtype.itemsize for a in avals)


def flops(step: Step, pairs: float) -> float:
    """Multiply-adds times two of a region call, 0 where its bytes decide. pairs: visible query-key pairs."""
    shape = lambda i: step.in_avals[i].shape
    if step.name in ("linear.column", "linear.row", "head.logprob"):
        return 2.0 * shape(0)[0] * shape(1)[0] * shape(1)[1]
    if step.name == "linear.dgrad":
        return 2.0 * shape(0)[0] * shape(1)[0] * shape(1)[1]
    if step.name == "linear.wgrad":
        return 2.0 * shape(0)[0] * shape(0)[1] * shape(1)[1]
    if step.name == "head.logprob_bwd":
        return 6.0 * shape(0)[0] * shape(1)[0] * shape(1)[1]
    if step.name in ("attn.core", "attn.core_bwd"):
        return (4.0 if step.name == "attn.core" else 10.0) * shape(0)[1] * shape(0)[2] * pairs
    return 0.0
