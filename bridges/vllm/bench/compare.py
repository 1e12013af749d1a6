"""Both engines on one GPU, each in a process of its own and timed in turns, and the table of their ratios.

Small steps hang on the host, whose speed drifts within minutes: in turns it is as fast for the one as for the other.
"""

from __future__ import annotations

import fcntl
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bridges import process
from bridges.bars import verdict
from bridges.vllm.bench.workload import Workload, checkpoint
from isojax.errors import InputError, IsoError

SIDES = ("stock", "isojax")
BAR = 1.05  # our time, or memory, over stock's
START_BARS = {"cold": 90, "warm": 10}  # s, of compiling all kernels
TURNS = 4, 100  # of a kind of step, at least and at most; both even, so that each engine comes first as often
MOST_S = 30.0  # of it, for each engine
SURE = 8, 0.04  # turns from which they may end where a ratio's interval is no wider than that part of it
FAR = 0.10  # or where all of the interval is that far from the bar: there more turns would decide nothing


def run(work: Workload, folder: Path, say: Callable[[str], None], sides: tuple[str, ...] = SIDES) -> dict[str, Any]:
    """What each side measured, and 'check': rows and log-probabilities compared with the reference.

    Raises: IsoError with the end of its log where a process failed; InputError where another run is in `folder`.
    """
    work = work.validated()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        return _run(work, folder, say, sides)


def _run(work: Workload, folder: Path, say: Callable[[str], None], sides: tuple[str, ...]) -> dict[str, Any]:
    say("checkpoint")
    model = checkpoint(work, folder / f"{work.model}-{work.layers}")
    work.save(folder / "workload.json")
    found: dict[str, Any] = {}
    for side in sides:
        (folder / f"{side}.json").unlink(missing_ok=True)  # a run that fails must not leave an older one's figures
    with ExitStack() as running:
        engines: dict[str, process.Asked] = {}
        for side in sides:
            say(f"start of {side}")
            module = ["bridges.vllm.bench.side", side, folder / "workload.json", model]
            engines[side] = running.enter_context(process.Asked(side, module, folder / f"{side}.log"))
            found[side] = engines[side].answer()
        measured = measure(engines, work, say)
        for side in sides:
            found[side] |= measured[side]
        if work.check and "isojax" in engines:
            found["isojax"] |= engines["isojax"].ask("sample")
    for side in sides:
        (folder / f"{side}.json").write_text(json.dumps(found[side]))
    if work.check and "isojax" in found:
        say("comparing bits")
        out = folder / "check.json"
        module = ["bridges.vllm.bench.check", model, folder / "isojax.json", out]
        process.run("check", module, folder / "check.log", XLA_PYTHON_CLIENT_PREALLOCATE="false")
        found["check"] = json.loads(out.read_text())
        found["isojax"].pop("sample")
    return found


def measure(engines: Mapping[str, Any], work: Workload, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Of each side: 'steps', a row for each pair of the workload, and 'batch' where it has requests."""
    found: dict[str, dict[str, Any]] = {side: dict(steps=[]) for side in engines}
    for count, length in work.steps:
        say(f"{count} x {length}")
        for engine in engines.values():
            engine.ask("warm_up", count, length)
        taken: dict[str, list[dict[str, Any]]] = {side: [] for side in engines}
        begun = time.perf_counter()
        for turn in range(TURNS[1]):
            late = turn >= TURNS[0] and time.perf_counter() - begun > MOST_S * len(engines)
            if turn % 2 == 0 and (late or _sure(list(taken.values()))):
                break
            for side in list(engines)[:: 1 if turn % 2 else -1]:
                taken[side].append(engines[side].ask("step", count, length, turn))
        turns = _whole(list(taken.values()))
        if not turns:
            raise IsoError(f"no two steps in a row ran {count} sequences; raise --decode")
        for side, own in zip(taken, zip(*turns, strict=True), strict=True):
            found[side]["steps"].append(_step(count, length, own))
        if len(engines) == len(SIDES):  # a run that is cut off later leaves this in its log
            stock, ours = (found[side]["steps"][-1] for side in SIDES)
            for what, kind, low, ratio, high in _step_ratios(stock, ours):
                times = f"stock {stock[f'{kind}_ms']:.4g} ms, ours {ours[f'{kind}_ms']:.4g} ms"
                say(f"{what}: {times}, ratio {ratio:.3f} ({low:.3f} to {high:.3f})")
    if work.requests:
        say(f"{work.requests} requests")
        took = [
            {side: engines[side].ask("batch", salt) for side in list(engines)[:: 1 - 2 * salt]} for salt in range(2)
        ]
        tokens = sum(work.batch(0)[1])
        for side in engines:
            s = min(t[side] for t in took)
            batch = dict(requests=work.requests, tokens=tokens, s=round(s, 3), tokens_per_s=round(tokens / s))
            found[side]["batch"] = batch
    return found


def _whole(sides: Sequence[Sequence[dict[str, Any]]]) -> list[tuple[dict[str, Any], ...]]:
    """The turns, an item a side, in which every side ran a decode step."""
    return [t for t in zip(*sides, strict=True) if all(own["decode"] for own in t)]


def _step(count: int, length: int, turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """ms of the prompts with their first token, and of a decode step: medians, quartile spreads, and each turn's."""
    row: dict[str, Any] = dict(sequences=count, prompt=length, repeats=len(turns))
    for what, taken in (("prefill", [[t["prefill"]] for t in turns]), ("step", [t["decode"] for t in turns])):
        low, middle, high = np.percentile(np.concatenate(taken) * 1e3, (25, 50, 75))
        row |= {f"{what}_ms": round(float(middle), 4), f"{what}_spread": round(float((high - low) / middle), 3)}
        row[f"{what}_turns_ms"] = [round(float(np.median(t)) * 1e3, 4) for t in taken]
    return row


def _step_ratios(stock: dict[str, Any], ours: dict[str, Any]) -> Iterator[tuple[str, str, float, float, float]]:
    """Of rows that `_step` made: what was timed, its key in them, and `by_turns` of it."""
    for kind, title in (("step", "decode step"), ("prefill", "prompts and first token")):
        what = f"{title}, {stock['sequences']} x {stock['prompt']}"
        yield what, kind, *by_turns(stock[f"{kind}_turns_ms"], ours[f"{kind}_turns_ms"])


def by_turns(stock: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """(low, ratio, high): our time over stock's, the median over turns, in which the two came one after the other.

    Low and high hold the median of all turns that there could be with a probability of 95% (order statistics), for a
    number of turns that was fixed beforehand; of fewer than six they are the least and the greatest, and hold less.
    """
    ratios = np.sort(np.array(ours) / np.array(stock))
    n = len(ratios)
    below = np.cumsum([math.comb(n, k) / 2**n for k in range(n)])  # P(at most k of n turns lie below the median)
    out = max(0, int(np.searchsorted(below, 0.025, side="right")) - 1)  # turns on either side of the interval
    return float(ratios[out]), float(np.median(ratios)), float(ratios[n - 1 - out])


def _sure(sides: list[list[dict[str, Any]]]) -> bool:
    """Whether both ratios of a kind of step, of prompts and of decode steps, are known well enough."""
    turns = _whole(sides)
    if len(turns) < SURE[0]:
        return False
    if len(sides) < 2:
        return True
    for time_of in (lambda t: t["prefill"], lambda t: float(np.median(t["decode"]))):
        low, middle, high = by_turns(*zip(*([time_of(side) for side in t] for t in turns), strict=True))
        far = high < BAR * (1 - FAR) or low > BAR * (1 + FAR)
        if high - low > SURE[1] * middle and not far:
            return False
    return True


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two runs would mix their files."""
    with (folder / "lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another `isojax bench engine` runs in {folder}; wait for it, or name another --folder"
            ) from None
        yield


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Table rows: what, stock, isojax, ratio (ours over stock, in time), the interval that it lies in, and the bar.

    quickest: the ratio of the quickest tenths of turns, which a busy host disturbs least. No bar asks for it.
    """
    stock, ours = found["stock"], found["isojax"]
    table = []
    claim = stock["device"] != "cpu"  # where no figure is one

    def row(
        what: str,
        a: float,
        b: float,
        ratio: float,
        judged: bool = claim,
        within: tuple[float, float] | None = None,
        quickest: float | str = "",
    ) -> None:
        low, high = within or (ratio, ratio)
        met = verdict(f"{BAR:.2f}", None if low <= BAR < high else ratio <= BAR) if judged else ""
        interval = f"{low:.3f} to {high:.3f}" if within else ""
        given = dict(what=what, stock=a, isojax=b, ratio=round(ratio, 3), interval=interval, quickest=quickest)
        table.append(given | dict(bar=met))

    for a, b in zip(stock["steps"], ours["steps"], strict=True):
        for what, kind, low, ratio, high in _step_ratios(a, b):
            quick = [float(np.quantile(side[f"{kind}_turns_ms"], 0.1)) for side in (a, b)]
            least = round(quick[1] / quick[0], 3)
            row(f"{what}, ms", a[f"{kind}_ms"], b[f"{kind}_ms"], ratio, within=(low, high), quickest=least)
    if "batch" in stock:
        a, b = stock["batch"], ours["batch"]
        what = f"{a['requests']} requests, tokens/s"
        row(what, a["tokens_per_s"], b["tokens_per_s"], b["s"] / a["s"])
    row("start, s", stock["start_s"], ours["start_s"], ours["start_s"] / stock["start_s"], judged=False)
    if claim:  # on cpu nothing is compiled ahead
        table.append(_compiling(ours))
    other = lambda m: m["weights"] + m["activation"]
    a, b = other(stock["memory"]), other(ours["memory"])
    if a:
        row("weights and activations, MiB", a, b, b / a)
    return table


def _compiling(ours: dict[str, Any]) -> dict[str, Any]:
    """The row of our kernels at the start. In between cold and warm no bar is asked for."""
    kept, compiled = ours["iso_kernels"]["kept"], ours["iso_kernels"]["compiled"]
    state = "warm" if kept and not compiled else "cold" if not kept else f"{kept} of {kept + compiled} kept"
    s = round(sum(t for what, t in ours["iso_start_s"].items() if what.startswith("kernels")), 2)
    bar = START_BARS.get(state)
    met = "" if bar is None else verdict(f"{bar} s", s <= bar)
    return dict(what=f"start: kernels, {state}, s", stock="-", isojax=s, ratio="", interval="", quickest="", bar=met)
