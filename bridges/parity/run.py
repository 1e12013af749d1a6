"""Runs the five jobs one after another, each in its own process, and compares what they recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridges.parity.compare import Row, compare
from bridges.parity.record import Record
from isojax import profile
from isojax.errors import IsoError

STEPS = {  # job -> whose tokens it recomputes
    "vllm-isojax": None,
    "megatron-isojax": "vllm-isojax",
    "jax-isojax": "vllm-isojax",
    "vllm-stock": None,
    "megatron-stock": "vllm-stock",
}
PAIRS = (  # what is compared; the first is the peer, and no bar
    ("vllm-stock", "megatron-stock"),
    ("vllm-isojax", "megatron-isojax"),
    ("vllm-isojax", "jax-isojax"),
    ("jax-isojax", "megatron-isojax"),
)


@dataclass
class Result:
    rows: list[Row]
    records: dict[str, Record]

    @property
    def zero(self) -> bool:
        """Whether IsoJAX differs nowhere, in token or vocabulary, and something was compared."""
        ours = [r for r in self.rows if "isojax" in r.pair]
        return (
            bool(ours)
            and all(r.equal for r in ours)
            and sum(r.tokens for r in ours) > 0
            and all(r.rows == r.tokens for r in ours)
        )


def run(
    folder: Path,
    model: str,
    prompts: list[list[int]],
    tokens: int,
    arch: str = "cpu",
    *,
    contract: Path | None = None,
    stock: bool = True,
    engine: dict[str, Any] | None = None,
) -> Iterator[str | Result]:
    """Yield the name of each job as it starts, then the Result.

    engine: further arguments for both vLLM engines. Raises: IsoError with a job's own words where it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec: dict[str, Any] = dict(
        model=model,
        prompts=prompts,
        tokens=tokens,
        arch=arch,
        context=max(map(len, prompts)) + tokens + 1,
        contract=str((contract or profile.path("dense", arch)).resolve()),
        engine=engine or {},
    )
    steps = {k: v for k, v in STEPS.items() if stock or "stock" not in k}
    for name, source in steps.items():
        yield name
        spec["tokens_from"] = str(folder / f"{source}.json") if source else None
        _job(name, spec, folder)
    records = {name: Record.load(folder / f"{name}.json") for name in steps}
    rows = [r for a, b in PAIRS if a in records and b in records for r in compare(records[a], records[b])]
    yield Result(rows, records)


def _job(name: str, spec: dict[str, Any], folder: Path) -> None:
    wanted, out, log = folder / f"{name}.spec.json", folder / f"{name}.json", folder / f"{name}.log"
    wanted.write_text(json.dumps(spec))
    out.unlink(missing_ok=True)
    environment = dict(os.environ)
    if spec["arch"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # each runtime takes its arch from the device it sees
        environment["JAX_PLATFORMS"] = "cpu"
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    elif name.startswith("vllm"):
        environment["JAX_PLATFORMS"] = "cpu"  # the launcher needs no XLA on the GPU, and vLLM wants its memory
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    with open(log, "w") as f:
        command = [sys.executable, "-m", "bridges.parity.jobs", name, str(wanted), str(out)]
        code = subprocess.run(command, env=environment, stdout=f, stderr=subprocess.STDOUT, check=False).returncode
    if code or not out.is_file():
        tail = log.read_text().strip().splitlines()[-1:] or ["no output"]
        raise IsoError(f"job {name} failed with exit code {code}: {tail[0]}; the whole log is {log}")
