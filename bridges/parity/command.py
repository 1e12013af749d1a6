"""`isojax parity`: the main job on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isojax.errors import InputError


def parity(
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; the demo model if left out.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; repeatable. Eight demo prompts if left out.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt and mode.")] = 32,
    arch: Annotated[str, typer.Option(help="cpu or sm90.")] = "cpu",
    contract: Annotated[Path | None, typer.Option(help="Contract file; the shipped dense profile if left out.")] = None,
    stock: Annotated[bool, typer.Option(help="Measure the stock stack beside ours.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for records, logs and report.html.")] = Path(".iso/parity"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Engine, trainer and JAX reference on the same tokens. Exit code 0 only if IsoJAX differs nowhere."""
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    import contract as contracts
    from bridges.parity import report
    from bridges.parity.run import STEPS, Result, run
    from isojax import batch, demo, doctor, profile
    from isojax.model.config import load_config
    from isojax.model.config import tokenizer as load_tokenizer

    if arch not in ("cpu", "sm90"):
        raise InputError(f"arch {arch!r} is unknown; allowed are cpu and sm90")
    if arch == "sm90":
        doctor.require_sm90()
    doctor.require_vllm()
    doctor.require_megatron()
    path = str(demo.checkpoint()) if model is None else model
    config = load_config(path)
    if path.endswith(".gguf"):
        raise InputError(f"parity takes a Hugging Face folder, as vLLM does; given {path}; export it first")
    held = contracts.load(contract or profile.path("dense", arch))
    if held.arch != arch:
        raise InputError(f"contract {held.name} is for arch {held.arch}; --arch is {arch}; name one contract for both")
    tokenizer = load_tokenizer(path)
    prompts = [list(tokenizer(p).input_ids) for p in (prompt or demo.PROMPTS)]
    batch.check_tokens(prompts, config.vocab, config.positions - tokens)

    for stale in ("report.html", "result.json"):
        (out / stale).unlink(missing_ok=True)  # a failed run must not leave an older verdict behind
    result = None
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("parity", total=len(STEPS) if stock else len(STEPS) - 2)
        for event in run(out, path, prompts, tokens, arch, contract=contract, stock=stock):
            if isinstance(event, Result):
                result = event
            else:
                bar.update(task, description=event)
                bar.advance(task, 0 if event == next(iter(STEPS)) else 1)
        bar.advance(task)
    assert result is not None
    report.write_html(result, out / "report.html")
    (out / "result.json").write_text(json.dumps(report.plain(result), indent=1))
    if as_json:
        print(json.dumps(report.plain(result), indent=1))
    else:
        console = Console(width=max(Console().width, 150))
        report.show(result, console)
        verdict = "0 differing: equal in every bit" if result.zero else "IsoJAX DIFFERS"
        console.print(f"{verdict}; report: {out / 'report.html'}", style="green" if result.zero else "bold red")
    if not result.zero:
        raise typer.Exit(1)
