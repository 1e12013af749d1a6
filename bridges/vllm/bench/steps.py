"""What a decode step takes by the worker's own clock: free of the prompts and of what the front end adds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

WINDOW = 4  # steps whose mean is one sample: vLLM schedules ahead, so that single steps may come in pairs

Begun = list[tuple[float, int]]  # of each step: seconds on the worker's clock, tokens it was given


def watch(worker: Any) -> None:
    """Inside a worker: note when each step begins, until `seen` is called."""
    real, begun = worker.execute_model, []

    def noted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append((time.perf_counter(), scheduled.total_num_scheduled_tokens))
        return real(scheduled, *args, **kwargs)

    worker.execute_model, worker.iso_begun = noted, begun


def seen(worker: Any) -> Begun:
    """Inside a worker: the steps since `watch`, whose hook goes."""
    begun = worker.iso_begun
    del worker.execute_model, worker.iso_begun
    return begun


def periods(begun: Sequence[tuple[float, int]], sequences: int, window: int = WINDOW) -> list[float]:
    """Seconds a decode step, of each window of steps that all ran `sequences` tokens, one a sequence.

    A window is shorter where fewer steps ran, and none holds the first step: a prompt of one token looks like it.
    """
    out: list[float] = []
    runs: Begun = []
    for at, tokens in [*begun[1:], (0.0, -1)]:
        if tokens == sequences:
            runs.append((at, tokens))
            continue
        steps = len(runs) - 1
        for first in range(0, steps, window):
            last = min(first + window, steps)
            if last - first == min(window, steps):  # a shorter rest would scatter more than the others
                out.append((runs[last][0] - runs[first][0]) / (last - first))
        runs = []
    return out
