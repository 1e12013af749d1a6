"""Kernels of many cases, ready to launch: lowered in worker processes (Python), compiled in threads (native code)."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from isojax.gates.bench import BenchCase
from isojax.kernel_plan import KernelPlan, kernel_plan
from isojax.region import load_modules, lookup


class Job(NamedTuple):
    """A bench case by name: workers make the case anew, since peers are closures."""

    region: str
    case: str


class Ready(NamedTuple):
    """What `load` made of a job's plan, or why there is nothing."""

    job: Job
    loaded: Any
    error: str


def workers_here(jobs: int) -> int:
    """As many as there are cores for this process, and no more than there are jobs."""
    return max(1, min(jobs, len(os.sched_getaffinity(0))))


def prepare(
    jobs: Sequence[Job], load: Callable[[KernelPlan], Any], modules: Sequence[str] = (), workers: int | None = None
) -> Iterator[Ready]:
    """Lower every job and `load` its plan, in any order, as they come.

    modules: import these in each worker, for regions that are not shipped. A job that fails says why; others go on.
    """
    count = workers or workers_here(len(jobs))
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit JAX's and CUDA's threads
    with ProcessPoolExecutor(count, spawn, _start, (tuple(modules),)) as lowering, ThreadPoolExecutor(count) as loading:
        try:
            lowered = {lowering.submit(_plan, job): job for job in jobs}
            loads: dict[Future[Any], Job] = {}
            while lowered or loads:
                done, _ = wait([*lowered, *loads], return_when=FIRST_COMPLETED)
                for future in done:
                    if (job := lowered.pop(future, None)) is not None:
                        plan = _failure(future) or future.result()
                        if isinstance(plan, str):
                            yield Ready(job, None, plan)
                        else:
                            loads[loading.submit(load, plan)] = job
                    else:
                        error = _failure(future)
                        yield Ready(loads.pop(future), None if error else future.result(), error)
        finally:  # interrupted: without this the pool would first finish every job that waits
            lowering.shutdown(wait=False, cancel_futures=True)


def _failure(future: Future[Any]) -> str:
    e = future.exception()
    return "" if e is None else f"{type(e).__name__}: {e}".splitlines()[0]


def _start(modules: tuple[str, ...]) -> None:
    load_modules(modules)


@functools.cache
def _cases(region: str) -> dict[str, BenchCase]:
    maker = lookup(region).bench
    assert maker is not None  # jobs are made from bench entries
    return {c.name: c for c in maker()}


def _plan(job: Job) -> KernelPlan | str:
    """In a worker. An error travels as text: not every exception survives pickling."""
    region = lookup(job.region)
    try:
        return kernel_plan(region, *_cases(job.region)[job.case].bound(region))
    except Exception as e:
        return f"{type(e).__name__}: {e}".splitlines()[0]
