"""`isojax bench engine`. Imports of vLLM and torch wait until the command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def engine(
    model: Annotated[str, typer.Option(help="qwen3-1.7b, qwen3-8b or tiny; weights are random.")] = "qwen3-1.7b",
    layers: Annotated[int, typer.Option(min=0, help="Layers that are built; 0 for all.")] = 0,
    requests: Annotated[int, typer.Option(min=0, help="Requests of the continuous batch.")] = 512,
    steps: Annotated[str, typer.Option(help="SEQUENCESxPROMPT pairs whose steps are timed.")] = (
        "1x128,32x128,256x128,1x4096,32x4096"
    ),
    decode: Annotated[int, typer.Option(min=2, help="Decode steps of a timing.")] = 64,
    check: Annotated[
        int, typer.Option(min=0, max=4, help="Sequences compared with the JAX reference, bit for bit.")
    ] = 4,
    utilization: Annotated[float, typer.Option(help="Share of the GPU that each of the two engines gets.")] = 0.40,
    context: Annotated[int, typer.Option(min=1, help="Longest request, in tokens.")] = 5120,
    folder: Annotated[Path, typer.Option(help="For the checkpoint, logs and results.")] = Path(".iso/bench-engine"),
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 where a bar is missed, or none was judged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """vLLM: stock against IsoJAX, same weights, prompts and sizes. Exit code 1 if bits differ."""
    from bridges import bars, shown
    from bridges.vllm.bench import compare
    from bridges.vllm.bench.workload import Workload
    from isojax import doctor
    from isojax.alone import alone
    from isojax.bench import machine
    from isojax.errors import InputError, IsoError

    doctor.require_vllm()
    if model != "tiny":
        doctor.require_sm90("--model tiny tries the command without one")
    try:
        pairs = tuple((int(a), int(b)) for a, b in (s.split("x") for s in steps.split(",") if s))
    except ValueError:
        raise InputError(f"--steps {steps!r}: give pairs as in 1x128,256x128") from None
    work = Workload(model, layers, pairs, decode, requests, check, context, utilization).validated()
    here = machine.facts(0)
    with shown.running("engine") as say:
        say("waiting for another measurement")
        with alone():
            found = compare.run(work, folder, say)
    table = compare.rows(found)
    if as_json:
        print(json.dumps(dict(machine=here) | found | dict(rows=table), indent=1))
    else:
        stock = found["stock"]
        console = shown.show(f"{model}: stock {stock['runner']} runner, {stock['graphs']} graphs", table)
        console.print(f"start of ours, s: {found['isojax']['iso_start_s']}", markup=False)
        console.print(f"against the JAX reference: {found.get('check', 'not compared')}", markup=False)
    if check:
        if not found["check"]["rows"]:
            raise IsoError("no full-vocabulary row was compared")
        if found["check"]["rows_differing"] or found["check"]["logprobs_differing"]:
            raise typer.Exit(1)
    bars.require(table, strict)
