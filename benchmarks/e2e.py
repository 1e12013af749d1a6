"""Whole runtimes on a Hopper GPU, random Qwen3-1.7B: `python -m benchmarks.e2e [--out FOLDER] [--layers N]`.

vLLM with FULL CUDA graphs and eagerly, Megatron's gradient-carrying forward, the JAX reference, and the stock stack:
the parity job's own processes and comparisons, on arch sm90.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(".iso/e2e"))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="run the eager engine too")
    parser.add_argument("--stock", action="store_true", help="run the stock stack too")
    options = parser.parse_args()
    from bridges.parity import report
    from bridges.parity.record import Record
    from bridges.parity.run import Result, _job, run
    from bridges.vllm.bench.workload import Workload, checkpoint
    from isojax import profile

    work = Path("/tmp/iso-e2e")
    started = time.perf_counter()
    model = checkpoint(Workload("qwen3-1.7b", options.layers), work / f"model-{options.layers}")
    print(f"checkpoint {time.perf_counter() - started:.1f} s", flush=True)
    contract = work / "dense.sm90.json"
    import contract as contracts

    contracts.save(profile.build("dense", "sm90"), contract)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 150000, n).tolist() for n in (5, 16, 17, 63, 64, 65, 200, 300)]
    common: dict[str, Any] = dict(
        skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_num_seqs=16, max_num_batched_tokens=384
    )
    out: dict[str, Any] = {}
    graphs = work / "graphs"
    for event in run(
        graphs, str(model), prompts, options.tokens, "sm90", contract=contract, stock=options.stock, engine=common
    ):
        if isinstance(event, Result):
            out["graphs"] = report.plain(event)
            out["zero"] = event.zero
            for row in event.rows:
                print(row.plain(), flush=True)
            for name, record in event.records.items():
                print(name, record.notes, f"{record.seconds:.1f} s", flush=True)
            print("IsoJAX differs nowhere:", event.zero, flush=True)
        else:
            print(f"[{time.perf_counter() - started:.0f} s] {event}", flush=True)
    if options.eager:
        eager = work / "eager"
        eager.mkdir(exist_ok=True)
        spec = json.loads((graphs / "vllm-isojax.spec.json").read_text())
        _job("vllm-isojax", spec | dict(engine=common | dict(enforce_eager=True)), eager)
        one, two = (Record.load(f / "vllm-isojax.json") for f in (graphs, eager))
        out["graphs_equal_eager"] = one.sequences["greedy"] == two.sequences["greedy"]
        out["eager_notes"] = two.notes
        print("graphs equal eager, greedy, tokens and full rows:", out["graphs_equal_eager"], two.notes)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "e2e.json").write_text(json.dumps(out, indent=1))
    return 0 if out["zero"] and out.get("graphs_equal_eager", True) else 1


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        for log in Path("/tmp/iso-e2e").glob("*/*.log"):
            print("=====", log, "\n".join(log.read_text().splitlines()[-25:]))
        raise
    sys.stdout.flush()
    os._exit(code)
