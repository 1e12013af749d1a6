"""`isojax bench trainer`. Imports of Megatron and torch wait until the command runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

NOTE = (
    "stock: Megatron's local spec, torch.compile'd activation, residual and cross-entropy fusions where there is a "
    "GPU, torch's FlashAttention-2 over cu_seqlens, rotary table laid out once. Transformer Engine would add fused "
    "rope, norm+linear, cuDNN or FlashAttention-3 both ways, weight gradients accumulated in the GEMM, and one-kernel "
    "Adam and clipping (the last serve both sides)."
)


def trainer(
    model: Annotated[str, typer.Option(help="qwen3-1.7b, qwen3-8b, tiny, or a checkpoint folder.")] = "qwen3-1.7b",
    layers: Annotated[int, typer.Option(min=0, help="Layers that are built; 0 for all.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="Packed tokens of a step.")] = 8192,
    sequences: Annotated[int, typer.Option(min=1, help="Rollouts in them.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 3,
    budget: Annotated[
        bool, typer.Option("--budget", help="Time each region of our step, too, after the others.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 where a bar is missed, or none was judged.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """A Megatron policy step: stock against IsoJAX, same weights, tokens and optimizer. Exit code 1 if bits differ."""
    from isojax import doctor
    from isojax.alone import alone
    from isojax.bench import machine
    from isojax.errors import IsoError

    doctor.require_megatron()
    if model != "tiny":
        doctor.require_sm90("--model tiny tries the command without one")
    from bridges import bars, shown  # Megatron takes seconds to import
    from bridges.megatron.bench import compare
    from bridges.megatron.bench.workload import Workload

    work = Workload(model, layers, tokens, sequences, steps, warmup)
    work.config("bfloat16")  # refuse before a process is started
    here = machine.facts(0)
    with shown.running("trainer") as say:
        say("waiting for another measurement")
        with alone():
            found = compare.run(work, say, budget)
    table = compare.rows(found)
    if as_json:
        print(json.dumps(dict(machine=here, workload=vars(work), sides=found, rows=table, note=NOTE), indent=1))
    else:
        ours = found["isojax"]
        console = shown.show(f"{model}, {ours['layers']} layers, {tokens} tokens, {ours['device']}", table)
        if budget:
            shown.show("our step, region by region", ours["budget"])
        console.print(NOTE, markup=False)
    if not found["isojax"]["compared"]:
        raise IsoError("no log-probability was compared; give sequences of at least two tokens")
    if found["isojax"]["differing"]:
        raise typer.Exit(1)
    bars.require(table, strict)
