"""Everything that only a Hopper GPU can show, in one call: `python -m benchmarks.hopper [STAGE ...] [--out FOLDER]`.

Stages: light, korder, gates and launcher of `isojax gate`, and bench, which is `isojax bench kernels`. Each is a
process of its own, and one failure does not hide the rest. FOLDER gets a JSON of each stage, and the report as HTML.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from isojax.gates.stages import STAGES

SAMPLE = r"Qwen3-1\.7B|V151936"  # of the bench; all with --all


def gate(stage: str, only: list[str], out: Path) -> int:
    """Run a stage of `isojax gate`, print what is not good, and return the exit code."""
    command = [sys.executable, "-m", "isojax.cli", "gate", *only, "--arch=sm90", f"--stage={stage}", "--keep-going"]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
    (out / f"{stage}.json").write_text(done.stdout)
    if done.returncode not in (0, 1):
        return done.returncode  # refused or broken: it has said why on stderr
    rows = json.loads(done.stdout)
    bad = [r for r in rows if r["passed"] != "yes"]
    for r in bad:
        print("NOT GOOD", r, flush=True)
    checked = sum(r["checked"] for r in rows)
    print(f"{stage}: {len(rows) - len(bad)} of {len(rows)} good, {checked} elements compared", flush=True)
    return done.returncode


def bench(only: list[str], out: Path, match: str) -> int:
    """Run `isojax bench kernels` and return the exit code; a missed bar is none."""
    command = [sys.executable, "-m", "isojax.cli", "bench", "kernels", *only, f"--match={match}"]
    return subprocess.run([*command, f"--json={out / 'bench.json'}", f"--html={out / 'bench.html'}"]).returncode


def main() -> int:
    parser = argparse.ArgumentParser()
    stages = (*STAGES, "bench")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(stages))
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", action="append", default=[], help="this region only; repeatable")
    parser.add_argument("--all", action="store_true", help="every case of the bench, not those of Qwen3-1.7B")
    options = parser.parse_args()
    if unknown := sorted(set(options.stages) - set(stages)):
        parser.error(f"no stage {', '.join(unknown)}; stages are {', '.join(stages)}")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU
    failed = []
    for stage in options.stages or stages:
        started = time.perf_counter()
        if stage == "bench":
            code = bench(options.only, options.out, "" if options.all else SAMPLE)
        else:
            code = gate(stage, options.only, options.out)
        print(f"{stage}: exit code {code} after {time.perf_counter() - started:.0f} s", flush=True)
        failed += [stage] if code else []
    print(f"failed: {', '.join(failed)}" if failed else "all good")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
