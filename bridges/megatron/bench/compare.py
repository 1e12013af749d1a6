"""Both sides, one after the other, in processes of their own, and what the two say together."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridges import process
from bridges.bars import verdict

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}  # dense bf16, NVIDIA's data sheets (SXM)
BARS = {"step": 1.10, "peak memory": 1.05}  # ours over stock
SIDES = ("stock", "isojax")


def run(work: Any, progress: Callable[[str], None] = lambda side: None, budget: bool = False) -> dict[str, Any]:
    """{side: what bench.side.measure gave}. budget: ours with its times of each region.

    Raises: IsoError with the end of a side's log where it failed.
    """
    out: dict[str, Any] = {}
    for side in SIDES:
        progress(side)
        with tempfile.TemporaryDirectory() as folder:
            job, result, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
            job.write_text(json.dumps(dict(side=side, work=dataclasses.asdict(work), budget=budget)))
            # JAX only traces: its own GPU client would take memory beside torch's
            process.run(side, ["bridges.megatron.bench.side", job, result], log, JAX_PLATFORMS="cpu")
            out[side] = json.loads(result.read_text())
    return out


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The table: a row for each phase, the step, memory, utilisation and mismatch."""
    stock, ours = (found[side] for side in SIDES)
    ms = [(phase.replace("_", " "), stock["ms"][phase], ours["ms"][phase]) for phase in stock["ms"]]
    both = lambda x: sum(t for phase, t in x["ms"].items() if phase != "optimizer")
    ms.append(("forward and backward", both(stock), both(ours)))
    ms.append(("issued by the host in", stock["host_ms"], ours["host_ms"]))
    ms.append(("step", stock["step_ms"], ours["step_ms"]))
    judged = stock["device"] != "cpu"  # where no time is a claim
    table = [_row(name, "ms", a, b, judged) for name, a, b in ms]
    if stock["peak_gib"] is not None:
        table.append(_row("peak memory", "GiB", stock["peak_gib"], ours["peak_gib"]))
    peak = next((v for k, v in PEAK_FLOPS.items() if k in stock["device"]), None)
    if peak is not None:
        used = [x["flops"] / (x["step_ms"] * 1e-3) / peak * 100 for x in (stock, ours)]
        table.append(_row("model FLOPs utilisation", "%", *used))
    mismatch = f"{ours['differing']} of {ours['compared']}"
    table.append(dict(what="mismatch with the engine", unit="", stock="-", isojax=mismatch, ratio="", bar=""))
    return table


def _row(what: str, unit: str, stock: float, ours: float, judged: bool = True) -> dict[str, Any]:
    bar = BARS.get(what) if judged else None
    met = "" if bar is None else verdict(f"{bar:.2f}", ours <= bar * stock)
    return dict(
        what=what, unit=unit, stock=round(stock, 2), isojax=round(ours, 2), ratio=f"{ours / stock:.3f}", bar=met
    )
