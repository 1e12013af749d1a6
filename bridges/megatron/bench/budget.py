"""Where our step goes, region by region: each region call of real steps timed in place."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from bridges.megatron.bench.step import Marks, Trainer
from bridges.megatron.bench.workload import MicroBatch
from bridges.megatron.runtime import Runtime
from isojax.program import Step, call_key


def measure(trainer: Trainer, runtime: Runtime, batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
    """A row for each region call of other shapes, the costliest first, from one step on each of `batches`."""
    steps: dict[Any, Step] = {}
    marks: dict[Any, list[Marks]] = defaultdict(list)

    def timed(step: Step, fn: Callable[..., Any]) -> Callable[..., Any]:
        key = call_key(step)
        steps[key] = step

        def run(*args: Any) -> Any:
            both = Marks(trainer.device)
            both.mark()
            out = fn(*args)
            both.mark()
            marks[key].append(both)
            return out

        return run

    with contextlib.ExitStack() as stack:
        for call in runtime.calls:
            for compiled in call.both_ways():
                stack.enter_context(compiled.wrapped(timed))
        for batch in batches:
            trainer.step(batch)
    rows = [_row(steps[key], [m.milliseconds()[0] for m in made], len(batches)) for key, made in marks.items()]
    return sorted(rows, key=lambda r: -r["ms a step"])


def _row(step: Step, ms: list[float], count: int) -> dict[str, Any]:
    return {
        "region": step.name,
        "first operands": " ".join("x".join(map(str, a.shape)) for a in step.in_avals[:2]),
        "calls a step": len(ms) // count,
        "us": round(sum(ms) / len(ms) * 1e3, 1),
        "ms a step": round(sum(ms) / count, 3),
    }
