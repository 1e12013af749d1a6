"""The table of kernels: choose cases, compile them side by side, then time them one after another."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from isojax.alone import alone
from isojax.bench import machine
from isojax.bench.compile import Job, prepare
from isojax.bench.result import Report, Row
from isojax.bench.sections import sections
from isojax.errors import InputError, RegionError
from isojax.gates.bench import BenchCase, BenchResult, Stopwatch, measure_case, rates
from isojax.kernel_plan import KernelPlan
from isojax.region import REGISTRY, Region, load_shipped, lookup

KEEP_EVERY = 20  # cases
REST_S = 1.0  # after a case, at most, and no longer than it took: right after a heavy one others were up to 10% slower
POISON = "CUDA error"  # after a kernel has crashed every later call of the process fails with the same words
Chosen = tuple[Region, BenchCase]
Progress = Callable[[str, int, int], None]  # phase, done, total


def choose(regions: Sequence[str] = (), match: str = "") -> list[Chosen]:
    """Cases of these regions (all that have some, if none is named) where `match` is found in "region/case".

    Raises: RegionError where a region is unknown or has no bench entry, two cases have one name, or nothing is left;
    InputError where `match` is no regular expression, or two cases would be one point of a plot.
    """
    try:
        wanted = re.compile(match)
    except re.error as e:
        raise InputError(f"--match {match!r} is no regular expression: {e}") from None
    load_shipped()
    named = [lookup(n) for n in regions] or [r for _, r in sorted(REGISTRY.items()) if r.bench is not None]
    out = []
    for r in named:
        if r.bench is None:
            raise RegionError(f"region {r.name} has no bench entry; define one with @region.bench_cases")
        out += [(r, c) for c in r.bench() if wanted.search(f"{r.name}/{c.name}")]
    if not out:
        raise RegionError(f"no bench case of {', '.join(r.name for r in named)} matches {match!r}")
    jobs = [Job(r.name, c.name) for r, c in out]
    if twice := next((j for j in jobs if jobs.count(j) > 1), None):
        raise RegionError(f"two bench cases are {twice.region}/{twice.case}; give each a name of its own")
    sections(_row(r, c, "not run") for r, c in out)  # what a report would refuse is refused before it takes minutes
    return out


def compiled(
    chosen: Sequence[Chosen],
    load: Callable[[KernelPlan], Any],
    progress: Progress,
    modules: Sequence[str] = (),
    workers: int | None = None,
) -> tuple[dict[Job, Any], dict[Job, str]]:
    """(what `load` made of each case's plan, why others have none)."""
    jobs = [Job(r.name, c.name) for r, c in chosen]
    loaded: dict[Job, Any] = {}
    errors: dict[Job, str] = {}
    for i, ready in enumerate(prepare(jobs, load, modules, workers)):
        if ready.error:
            errors[ready.job] = ready.error
        else:
            loaded[ready.job] = ready.loaded
        progress("compile", i + 1, len(jobs))
    return loaded, errors


def loader(device: Any) -> Callable[[KernelPlan], Any]:
    """Makes a plan's launcher on a CUDA device."""
    launcher = importlib.import_module("bridges.torch_ops.cuda").Launcher  # arrows point from bridges to isojax
    return lambda plan: launcher(plan, device)


def run(
    chosen: Sequence[Chosen],
    device: Any,
    progress: Progress,
    modules: Sequence[str] = (),
    workers: int | None = None,
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Compile and measure. A case that fails is a row with its error.

    keep: gets the report so far now and then, so that a kernel that hangs does not cost the others' figures.
    """
    import torch

    started = time.perf_counter()
    loaded, errors = compiled(chosen, loader(device), progress, modules, workers)
    compiling = time.perf_counter() - started
    with alone():
        started = time.perf_counter()
        watch = Stopwatch(torch, device)
        measured = rates(torch, device, watch)
        here = machine.describe(device, *measured)
        rows, lost = [], ""
        for i, (region, case) in enumerate(chosen):
            job = Job(region.name, case.name)
            if lost or job not in loaded:
                rows.append(_row(region, case, errors.get(job) or lost))
            else:
                begun = time.perf_counter()
                rows.append(_measured(region, case, loaded.pop(job), watch, *measured))
                time.sleep(min(REST_S, time.perf_counter() - begun))
                if POISON in rows[-1].error:
                    lost = f"not run: the GPU is lost to this process since {rows[-1].name}; run this case again alone"
            progress("measure", i + 1, len(chosen))
            if i % KEEP_EVERY == KEEP_EVERY - 1:
                keep(Report(machine=here, seconds={"compile": compiling}, rows=tuple(rows)))
        if not lost:
            here = here.model_copy(update={"clocks_after": machine.smi(device, *machine.CLOCKS)})
        measuring = time.perf_counter() - started
    return Report(machine=here, seconds={"compile": compiling, "measure": measuring}, rows=tuple(rows))


def _row(region: Region, case: BenchCase, error: str = "", r: BenchResult | None = None) -> Row:
    place = dict(region=region.name, case=case.name, model=case.model, part=case.part, at=dict(case.at), error=error)
    if r is None:
        return Row(**place)  # pyright: ignore[reportArgumentType]
    return Row(
        **place,  # pyright: ignore[reportArgumentType]
        us=r.us,
        spread=r.ours.spread,
        against=r.against,
        peer_us=r.peer_us,
        by_rounds=r.speedup,
        peer_spread=r.peer and r.peer.spread,
        bytes_us=r.bytes_us,
        flops_us=r.flops_us,
        memory=r.memory,
        peer_memory=r.peer_memory,
        copy_us=r.copy and r.copy.us,
        copy_by_rounds=r.copy and 1 / r.copy.ratio,
        distance=r.distance,
    )


def _measured(region: Region, case: BenchCase, launch: Any, watch: Stopwatch, bandwidth: float, flops: float) -> Row:
    import torch

    try:
        torch.cuda.empty_cache()  # operands get memory of their own, as weights do
        return _row(region, case, r=measure_case(region, case, launch, watch, bandwidth, flops))
    except Exception as e:  # one case must not cost the others; the row says why, and the command's exit code that
        return _row(region, case, f"{type(e).__name__}: {e}".splitlines()[0])
