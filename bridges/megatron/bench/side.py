"""One side of the comparison in a process of its own: `python -m bridges.megatron.bench.side JOB.json OUT.json`.

Peak memory is a process's, and neither side may warm or fragment the other's allocator.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bridges.megatron import start
from bridges.megatron.bench import budget as regions
from bridges.megatron.bench import parity
from bridges.megatron.bench.step import PHASES, Trainer
from bridges.megatron.bench.workload import Workload, flops, micro_batches
from bridges.megatron.flash import flash_model
from bridges.megatron.model import IsoGPTModel, build
from isojax.model import weights

SIDES = ("stock", "isojax")
BUDGET = 3  # steps, at most, whose regions are timed


def measure(side: str, work: Workload, budget: bool = False) -> dict[str, Any]:
    """Medians of a side's phases in ms, its peak memory, and for ours the comparison with the engine's form.

    budget: after everything else, time each region of our step (bench.budget).

    Raises: InputError, Unsupported; Unavailable without Megatron.
    """
    began = time.perf_counter()
    start.single()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    config = work.config("bfloat16" if cuda else "float32")  # Megatron's bf16 optimizer takes CUDA tensors only
    make = flash_model if side == "stock" else build
    model = make(config, weights.random(config, work.seed, str(device)))
    batches = micro_batches(work, config.vocab, work.warmup + work.steps, device)
    engine = None
    if isinstance(model, IsoGPTModel):
        model.runtime.prepare(work.tokens, batches[0].packing, device)
        engine = parity.EngineForm(model, batches[-1], work.parity)
    ready = time.perf_counter()
    out: dict[str, Any] = dict(side=side, device=torch.cuda.get_device_name() if cuda else "cpu", layers=config.layers)
    trainer = Trainer(model, device)
    _reset_peak(cuda)
    warm = [trainer.step(batch) for batch in batches[: work.warmup]]
    timed = [trainer.step(batch) for batch in batches[work.warmup :]]
    out |= _memory(cuda)
    if engine is not None:
        compared, wrong = engine.differing(trainer.logprobs(batches[-1]))
        out |= dict(compared=compared, differing=wrong)
    if budget and isinstance(model, IsoGPTModel):
        out["budget"] = regions.measure(trainer, model.runtime, batches[-BUDGET:])
    step = [sum(r.phases.values()) for r in timed]
    return out | dict(
        steps=len(timed),
        ms={p: statistics.median(r.phases[p] for r in timed) for p in PHASES},
        step_ms=statistics.median(step),
        step_ms_range=[min(step), max(step)],
        host_ms=statistics.median(r.host_ms for r in timed),
        flops=statistics.mean(flops(config, b) for b in batches[work.warmup :]),
        losses=[r.loss for r in warm + timed],
        grad_norms=[r.grad_norm for r in warm + timed],
        prepare_s=round(ready - began, 1),
        total_s=round(time.perf_counter() - began, 1),
    )


def _reset_peak(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _memory(cuda: bool) -> dict[str, Any]:
    """Peak of torch's allocator over the steps, and what the device as a whole has in use."""
    if not cuda:
        return dict(peak_gib=None, device_gib=None)
    free, total = torch.cuda.mem_get_info()
    return dict(peak_gib=torch.cuda.max_memory_allocated() / 2**30, device_gib=(total - free) / 2**30)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = measure(job["side"], Workload(**job["work"]), job["budget"])
    Path(sys.argv[2]).write_text(json.dumps(out))


if __name__ == "__main__":
    main()
