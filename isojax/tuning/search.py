"""`isojax tune`: measure tiles on this GPU and keep the fastest of those that give the rule's bits.

A candidate is first gated: on ill-conditioned data, where every change of the order of additions shows, its output must
equal, bit for bit, that of the kernel's own rule. The gate is tried first on a product that adds in another order,
which it must refuse.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp

from contract import files
from isojax import outputs, tuning
from isojax.alone import LOCK, alone
from isojax.errors import InputError, RegionError, Unavailable
from isojax.gates import shapes
from isojax.pallas_kernels.linear.candidates import candidates
from isojax.pallas_kernels.linear.tiles import Tiles, for_row
from isojax.region import lookup
from isojax.schedule import LEAVES
from isojax.tuning.table import Choice, Entry, Region, Shape, Table, TableError, dump, load

REGIONS = get_args(Region)
ROWS = tuple(sorted({shapes.padded(m) for m in (*shapes.ROWS, *shapes.MIXED_ROWS)}))  # the kernels' row counts
GAIN = 0.99  # an entry must be this much faster than the rule, or the rule stays
DEVICE = "cuda:0"
VIRTUAL = 8  # parts of K that cancel in the gate's data


@dataclasses.dataclass(frozen=True)
class Job:
    """One shape of one region at one row count."""

    region: Region
    n: int
    k: int
    leaves: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.region} N{self.n} K{self.k} leaves{self.leaves} M{self.rows}"

    @property
    def shape(self) -> dict[str, int]:
        return dict(n=self.n, k=self.k, leaves=self.leaves)

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return (
            jax.ShapeDtypeStruct((self.rows, self.k), jnp.bfloat16),
            jax.ShapeDtypeStruct((self.n, self.k), jnp.bfloat16),
        )

    def plan(self) -> Any:
        """What one call launches."""
        from isojax.kernel_plan import kernel_plan

        region = lookup(self.region)
        statics = {} if region.name == "linear.column" else dict(leaves=self.leaves)
        return kernel_plan(region, *region.bind(self.avals, statics))

    @property
    def rule(self) -> Tiles:
        return for_row(self.rows, self.n, self.k, self.leaves)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a job came to. times: medians in us by tiles, the rule first. refused: tiles whose bits differ. skipped: why
    tiles were not compiled."""

    job: Job
    times: dict[str, float]
    refused: tuple[str, ...]
    skipped: dict[str, str]
    entry: Entry | None
    error: str = ""

    @property
    def failure(self) -> str:
        """Why nothing of this job is kept, or ''."""
        differ = f"the bits of {', '.join(self.refused)} differ from the rule's" if self.refused else ""
        return self.error or differ


def jobs(regions: Iterable[str], match: str = "", rows: Iterable[int] = ROWS) -> list[Job]:
    """The products of the models that isojax.gates.shapes names, each once.

    Raises: RegionError for a region that has no tuned tiles, or where nothing is left; InputError where `match` is no
    regular expression.
    """
    try:
        wanted = re.compile(match)
    except re.error as e:
        raise InputError(f"--match {match!r} is no regular expression: {e}") from None
    found: dict[Job, None] = {}
    for region in regions:
        if region not in REGIONS:
            raise RegionError(f"region {region} has nothing to tune; tunable are {', '.join(REGIONS)}")
        for model in shapes.MODELS:
            leaves = 1 if region == "linear.column" else LEAVES // model.ranks
            for _, n, k in model.column if region == "linear.column" else model.row:
                found |= dict.fromkeys(Job(cast(Region, region), n, k, leaves, m) for m in rows)
    chosen = [j for j in found if wanted.search(j.name)]
    if not chosen:
        raise RegionError(f"nothing to tune matches {match!r}; names are as in {next(iter(found)).name!r}")
    return chosen


def tune(chosen: list[Job], processes: int, lock: Path = LOCK) -> Iterator[Found]:
    """Measure jobs, each in one of `processes` processes; results as they come, a failed job's too."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes: they launch without a JAX client on the GPU
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        try:
            futures = {pool.submit(_guarded, job, lock): job for job in chosen}
            for future in as_completed(futures):
                lost = future.exception()  # its process has ended, and the pool with it: what is measured stays
                yield _failed(futures[future], lost) if lost else future.result()
        finally:  # interrupted: without this the pool would first finish every job that waits
            pool.shutdown(wait=False, cancel_futures=True)


def merge(device: str, old: Table | None, found: Iterable[Found]) -> Table:
    """The table of what was found, with the old entries of what was not measured now.

    Where the bits of a candidate differed the rule stays, and an old entry goes: one of the two has changed.
    """
    place = lambda region, shape, rows: (region, tuple(sorted(shape.items())), rows)
    entries = {place(e.region, dict(e.shape), e.rows): e for e in (old.entries if old else ())}
    for f in found:
        if f.error:
            continue
        at = place(f.job.region, f.job.shape, f.job.rows)
        entries.pop(at, None)
        if f.entry and not f.refused:
            entries[at] = f.entry
    made = dict(date=datetime.date.today().isoformat(), jax=importlib.metadata.version("jax"))
    return Table(device=device, made=made, entries=tuple(entries[at] for at in sorted(entries)))


def check(out: Path | None) -> None:
    """Refuse, before anything is measured, what `write` would refuse after it: see there. InputError for a bad path."""
    device = _device()
    outputs.check(out or tuning.path(device))
    _old(device, out)


def write(found: Sequence[Found], out: Path | None) -> Path:
    """Write the table of this machine's GPU, or of what was found alone to `out`; returns where.

    Raises: TableError where every job failed, or the table on disk is not valid; Unavailable where the machine's GPUs
    are of several kinds.
    """
    if found and all(f.error for f in found):
        raise TableError(f"no job was measured, and nothing was written; {found[0].job.name}: {found[0].error}")
    device = _device()
    path = out or tuning.path(device)
    files.write(path, dump(merge(device, _old(device, out), found)))
    return path


def _device() -> str:
    device = tuning.installed()
    if device is None:
        raise Unavailable("a table is of one kind of GPU, and this machine has none, or several kinds; tune elsewhere")
    return device


def _old(device: str, out: Path | None) -> Table | None:
    """Read anew each time: another `isojax tune` may have written it since."""
    path = tuning.path(device)
    return load(path, device) if out is None and path.exists() else None


def shown(f: Found) -> dict[str, Any]:
    """One row for people: the rule's time, the best and the runner-up."""
    best = sorted(((us, name) for name, us in f.times.items()))
    return dict(
        job=f.job.name,
        rule_us=f.times.get("rule"),
        best=best[0][1] if best else "failed",
        us=best[0][0] if best else None,
        candidates=len(f.times) - 1,
        refused=", ".join(f.refused),
        skipped=", ".join(f.skipped),
    )


def _guarded(job: Job, lock: Path) -> Found:
    """`search`, whose failure becomes a result that `merge` leaves out: one job's does not end the others."""
    try:
        return search(job, lock)
    except Exception as e:
        return _failed(job, e, traceback.format_exc()[-800:])


def _failed(job: Job, e: BaseException, where: str = "") -> Found:
    return Found(job, {}, (), {}, None, f"{type(e).__name__}: {e}\n{where}".rstrip())


def search(job: Job, lock: Path) -> Found:
    """Compile, gate and time the rule's tiles and the candidates of one job on CUDA device 0."""
    import torch

    launcher = importlib.import_module("bridges.torch_ops.cuda").Launcher
    device = torch.device(DEVICE)
    with tuning.defaults():
        rule = launcher(job.plan(), device)
    runs: dict[Tiles, Callable[..., Any]] = {}
    skipped = {}
    for t in (t for t in candidates(job.rows, **job.shape) if t != job.rule):
        try:
            with tuning.forced(t):
                runs[t] = launcher(job.plan(), device)
        except ValueError as e:  # no room for it in shared memory
            skipped[label(t)] = str(e)
    with alone(lock):
        operands = cancelling(torch, job, device)
        want = rule(*operands)[0]
        if not differing(torch, rule, reordered(*operands), want):
            raise TableError(f"{job.name}: the gate is broken: it takes another order of K for the same")
        refused = [t for t, run in runs.items() if differing(torch, run, operands, want)]
        good = {t: run for t, run in runs.items() if t not in refused}
        del operands, want
        times = _times(torch, device, job, [rule, *good.values()])
    named = dict(zip(["rule", *map(label, good)], times, strict=True))
    best = min(range(len(times)), key=times.__getitem__)
    entry = None
    if times[best] < GAIN * times[0]:
        choice = Choice(**dataclasses.asdict(list(good)[best - 1]))
        entry = Entry(
            region=job.region, shape=Shape(**job.shape), rows=job.rows, choice=choice,
            us=round(times[best], 2), rule_us=round(times[0], 2),
        )  # fmt: skip
    return Found(job, {k: round(v, 2) for k, v in named.items()}, tuple(map(label, refused)), skipped, entry)


def cancelling(torch: Any, job: Job, device: Any) -> tuple[Any, Any]:
    """Operands of a job, magnitudes log-uniform over 2^-12 .. 2^6.

    In the second half of the outputs the upper half of K takes away what the lower half adds, part by part in another
    order, so that only roundings are left and the order of every addition shows after the rounding to bf16.
    """
    torch.manual_seed(0)
    width, half = job.k // VIRTUAL, VIRTUAL // 2
    made = []
    for rows in (job.rows, job.n):
        a = torch.exp2(torch.rand(rows, VIRTUAL, width, device=device) * 18 - 12)
        a = a.mul_(torch.randint(2, a.shape, device=device) * 2 - 1).to(torch.bfloat16)
        made.append(a)
    x, w = made
    order = [1, 2, 3, 0]
    x[:, half:] = x[:, order]
    w[job.n // 2 :, half:] = -w[job.n // 2 :, order]
    return x.view(job.rows, job.k), w.view(job.n, job.k)


def reordered(*operands: Any) -> list[Any]:
    """The same products in another order along K, as a kernel with another schedule would add them."""
    order = [2, 0, 3, 1, *range(4, VIRTUAL)]
    return [a.view(len(a), VIRTUAL, -1)[:, order].reshape(a.shape) for a in operands]


def differing(torch: Any, run: Callable[..., Any], operands: Sequence[Any], want: Any) -> int:
    """Elements whose bits differ."""
    got = run(*operands)[0]
    return int((got.view(torch.int16) != want.view(torch.int16)).sum())


def _times(torch: Any, device: Any, job: Job, runs: list[Callable[..., Any]]) -> list[float]:
    from isojax.gates.bench import Stopwatch

    torch.manual_seed(1)
    x = torch.randn(job.rows, job.k, dtype=torch.bfloat16, device=device)
    w = torch.randn(job.n, job.k, dtype=torch.bfloat16, device=device).mul_(job.k**-0.5)
    calls = [lambda run=run: run(x, w) for run in runs]
    return [t.us for t in Stopwatch(torch, device).among(*calls)]


def label(t: Tiles) -> str:
    """Tiles in a few letters: 64x128x64/2x1, and what is not as usual."""
    rest = [f" {f.name}={getattr(t, f.name)}" for f in dataclasses.fields(t)[4:] if getattr(t, f.name) != f.default]
    return f"{t.m}x{t.n}x{t.k}/{t.groups[0]}x{t.groups[1]}" + "".join(rest)
