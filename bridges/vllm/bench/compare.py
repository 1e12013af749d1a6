"""Both engines one after the other, each in a process of its own, and the table of their ratios."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridges.vllm.bench.workload import Workload, checkpoint
from isojax.errors import IsoError

SIDES = ("stock", "isojax")
SECONDS = 1800  # for one side


def run(work: Workload, folder: Path, say: Callable[[str], None], sides: tuple[str, ...] = SIDES) -> dict[str, Any]:
    """What each side measured, and 'check': rows and log-probabilities compared with the reference.

    Raises: IsoError with the end of its log where a process failed.
    """
    work = work.validated()
    folder.mkdir(parents=True, exist_ok=True)
    say("checkpoint")
    model = checkpoint(work, folder / f"{work.model}-{work.layers}")
    work.save(folder / "workload.json")
    found: dict[str, Any] = {}
    for side in sides:
        say(side)
        out = folder / f"{side}.json"
        _process(folder, side, ["bridges.vllm.bench.side", side, folder / "workload.json", model, out], {})
        found[side] = json.loads(out.read_text())
    if work.check and "isojax" in found:
        say("comparing bits")
        out = folder / "check.json"
        here = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        _process(folder, "check", ["bridges.vllm.bench.check", model, folder / "isojax.json", out], here)
        found["check"] = json.loads(out.read_text())
        found["isojax"].pop("sample")
    return found


def _process(folder: Path, name: str, module: list[Any], more: dict[str, str]) -> None:
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", *map(str, module)]
    with log.open("wb") as f:
        try:
            code = subprocess.run(command, stdout=f, stderr=f, env=os.environ | more, timeout=SECONDS).returncode
            how = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            code, how = -1, f"was ended after {SECONDS} s"
    if code:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise IsoError(f"{name} {how}; its log {log} ends:\n{end}")


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Table rows: what, stock, isojax, ratio (isojax over stock time; at most 1.05 is the bar)."""
    stock, ours = found["stock"], found["isojax"]
    table = []

    def row(what: str, a: float, b: float, ratio: float) -> None:
        table.append(dict(what=what, stock=a, isojax=b, ratio=round(ratio, 3)))

    for a, b in zip(stock["steps"], ours["steps"], strict=True):
        what = f"{a['sequences']} x {a['prompt']}"
        row(f"decode step, {what}, ms", a["step_ms"], b["step_ms"], b["step_ms"] / a["step_ms"])
        row(f"prompts and first token, {what}, ms", a["prefill_ms"], b["prefill_ms"], b["prefill_ms"] / a["prefill_ms"])
    if "batch" in stock:
        a, b = stock["batch"], ours["batch"]
        what = f"{a['requests']} requests, tokens/s"
        row(what, a["tokens_per_s"], b["tokens_per_s"], b["s"] / a["s"])
    row("start, s", stock["start_s"], ours["start_s"], ours["start_s"] / stock["start_s"])
    other = lambda m: m["weights"] + m["activation"]
    a, b = other(stock["memory"]), other(ours["memory"])
    if a:
        row("weights and activations, MiB", a, b, b / a)
    return table
