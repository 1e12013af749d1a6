"""`isojax`: one command line. Exit codes: 1, a difference was found; 2, refused (one sentence); 70, our own defect."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from isojax.errors import IsoError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
contract_app = typer.Typer(no_args_is_help=True, help="Build, show, validate and compare execution contracts.")
app.add_typer(contract_app, name="contract")
console = Console()

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Arch = Annotated[str, typer.Option(help="Implementation to run: cpu or sm90.")]


def main() -> None:
    """Entry point. Commands of other packages (parity) join through the entry-point group `isojax.commands`, benchmarks
    through `isojax.bench`."""
    import contract
    from isojax.bench.cli import joined

    app.add_typer(joined(), name="bench")
    for entry in importlib.metadata.entry_points(group="isojax.commands"):
        app.command(name=entry.name)(entry.load())
    try:
        code = app(standalone_mode=False)  # a typer.Exit comes back as its code, not as an exception
    except (IsoError, contract.ContractError) as e:
        _fail(str(e))
    except OSError as e:
        _fail(f"{e.strerror or e}: {e.filename}" if e.filename else str(e))
    except typer.Abort:
        _fail("interrupted")
    except Exception as e:
        if type(e).__module__.startswith(("click", "typer")) and hasattr(e, "format_message"):
            where = getattr(getattr(e, "ctx", None), "command_path", "isojax")
            _fail(f"{e.format_message().rstrip('.')}; see `{where} --help`")  # type: ignore[attr-defined]
        traceback.print_exc()
        sys.exit(70)  # a defect of ours; 1 is kept for "a difference was found"
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> None:
    print(f"isojax: {message}", file=sys.stderr)
    sys.exit(2)


def _show(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=title)
    for name in rows[0] if rows else ("nothing",):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[escape(str(v)) for v in row.values()])
    console.print(table)


def _tokenize(model: str, prompts: list[str]) -> tuple[Any, list[list[int]]]:
    from isojax.model.config import tokenizer

    made = tokenizer(model)
    return made, [list(made(p).input_ids) for p in prompts]


def _model(model: str | None) -> str:
    from isojax import demo

    return str(demo.checkpoint()) if model is None else model


Model = Annotated[str | None, typer.Option(help="Checkpoint folder or .gguf file; the demo model if left out.")]


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    model: Model = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 32,
    as_json: Json = False,
) -> None:
    """Greedy generation in the standalone JAX reference."""
    from rich.progress import Progress

    from isojax.runtime import Reference

    path = _model(model)
    reference = Reference.load(path)
    tokenizer, ids = _tokenize(path, prompt)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokens", total=max_tokens)
        new, _ = reference.generate(
            ids, max_tokens, stop=tokenizer.eos_token_id, progress=lambda n: bar.update(task, completed=n)
        )
    rows = [dict(prompt=p, text=tokenizer.decode(t), tokens=t) for p, t in zip(prompt, new, strict=True)]
    _show(rows, "generate", as_json)


@app.command()
def score(
    text: Annotated[list[str], typer.Argument(help="One or more texts.")],
    model: Model = None,
    temperature: Annotated[float, typer.Option(min=1e-6)] = 1.0,
    as_json: Json = False,
) -> None:
    """Log-probability of every token of a text after its first, in the standalone JAX reference."""
    from isojax.runtime import Reference

    path = _model(model)
    reference = Reference.load(path)
    tokenizer, ids = _tokenize(path, text)
    rows = []
    for i, (sequence, values) in enumerate(zip(ids, reference.logprobs(ids, temperature), strict=True)):
        for token, value in zip(sequence[1:], values, strict=True):
            shown = float(value) if as_json else f"{value:.9g}"
            rows.append(
                dict(
                    text=i,
                    token=token,
                    piece=tokenizer.decode([token]),
                    logprob=shown,
                    bits=value.tobytes()[::-1].hex(),
                )
            )
    _show(rows, f"log-probabilities at temperature {temperature}", as_json)


@app.command()
def gate(
    region: Annotated[list[str] | None, typer.Argument(help="Regions; every gated one if left out.")] = None,
    arch: Arch = "cpu",
    quick: Annotated[bool, typer.Option(help="Batches up to 65 rows only.")] = False,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="gates, and on sm90: light, launcher, korder; repeatable. gates if left out."),
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="A step that breaks is a row, not the end.")] = False,
    load: Annotated[list[str] | None, typer.Option(help="Module that defines regions of yours; repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Bit-equality gates, each after its negative control. Exit code 1 if bits differ."""
    from rich.progress import track

    from isojax import doctor as room
    from isojax.errors import Unsupported
    from isojax.gates.stages import STAGES, fenced
    from isojax.region import load_modules

    _check_arch(arch)
    chosen = stage or ["gates"]
    for name in chosen:
        if name not in STAGES:
            raise Unsupported("isojax gate", f"--stage {name}", ", ".join(STAGES), "choose one of them")
        if arch != "sm90" and name != "gates":
            raise Unsupported("isojax gate", f"--stage {name} on {arch}", "gates", "pass --arch sm90")
    if arch == "sm90":
        room.require_sm90()
    load_modules(load or [])
    steps = [step for name in chosen for step in STAGES[name](region or [], arch, quick)]
    if not steps:
        raise Unsupported(
            "isojax gate", f"regions {region} in stages {chosen}", "regions that a stage checks", "name others"
        )
    results, console = [], Console(stderr=True)
    for name, step in track(steps, "gates", console=console, transient=True):
        for r in fenced(name, step) if keep_going else step():
            results.append(r)
            console.print(f"{r.name}: {r.differing} of {r.checked} differ", highlight=False)  # a gate may take minutes
    rows = [
        dict(gate=r.name, checked=r.checked, differing=r.differing, passed="yes" if r.passed else "NO", detail=r.detail)
        for r in results
    ]
    _show(rows, f"gates on {arch}", as_json)
    if not all(r.passed for r in results):
        raise typer.Exit(1)


@app.command()
def tune(
    region: Annotated[list[str] | None, typer.Argument(help="Regions; all that can be tuned if left out.")] = None,
    match: Annotated[str, typer.Option(help="Regular expression over REGION SHAPE; others keep their entries.")] = "",
    out: Annotated[Path | None, typer.Option(help="File to write; the shipped table of this GPU if left out.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile; one at a time is on the GPU.")] = 4,
    as_json: Json = False,
) -> None:
    """Measure tiles on this GPU and write the fastest of those whose bits a gate finds equal to the default's.

    Exit code 1 if a shape failed: the others are written, and what failed is named. Ctrl-C writes what was measured.
    """
    from rich.progress import track

    from isojax import doctor as room
    from isojax.tuning import search

    chosen = search.jobs(region or search.REGIONS, match)
    room.require_sm90("tune on the GPU that the table is for")
    search.check(out)
    found: list[search.Found] = []
    interrupted = False
    try:
        for f in track(search.tune(chosen, workers), "tune", len(chosen), console=Console(stderr=True), transient=True):
            found.append(f)
    except KeyboardInterrupt:
        if not found:
            raise
        interrupted = True  # what was measured took minutes of a GPU
    path = search.write(found, out)
    _show([search.shown(f) for f in found], f"wrote {path}", as_json)
    failed = [f for f in found if f.failure]
    for f in failed:
        print(f"isojax: not written: {f.job.name}: {f.failure}", file=sys.stderr)
    if interrupted:
        done = f"{len(found)} of {len(chosen)} shapes were measured and are written"
        print(f"isojax: interrupted: {done}; the others are as they were; --match names some", file=sys.stderr)
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can run, what it refuses, and why."""
    from isojax import doctor as room

    _show([dict(what=c.what, runs="yes" if c.runs else "no", why=c.why) for c in room.examine()], "doctor", as_json)


@contract_app.command("build")
def contract_build(
    out: Annotated[Path, typer.Argument(help="File to write.")], family: str = "dense", arch: Arch = "cpu"
) -> None:
    """Generate a contract from this installation's registry."""
    import contract
    from isojax import profile

    _check_arch(arch)
    built = profile.build(family, arch)
    contract.save(built, out)
    console.print(f"wrote {out}: numerical_policy {built.identities.numerical_policy}", markup=False)


@contract_app.command("show")
def contract_show(path: Path, as_json: Json = False) -> None:
    """Print a contract's identities and composition."""
    import contract

    c = contract.load(path)
    if as_json:
        print(json.dumps(c.plain(), indent=1))
        return
    assert c.identities is not None  # load refuses an unsealed contract
    for name, digest in c.identities.plain().items():
        console.print(f"{name:18} {digest}")
    rows = [
        dict(region=e.region, cases=", ".join(e.cases), implementation=str(e.impl), artifact=(e.artifact or "")[:12])
        for e in c.composition
    ]
    _show(rows, c.name, False)


@contract_app.command("validate")
def contract_validate(path: Path, live: bool = False) -> None:
    """Check a contract's rules and identities; with --live, that this installation would run exactly it."""
    import contract
    from isojax import profile

    c = contract.load(path)
    if live:
        fresh = profile.build(c.model_family, c.arch)
        if fresh.identities != c.identities:
            _print_changes(contract.differences(c, fresh))
            console.print("this installation would run something else")
            raise typer.Exit(1)
    assert c.identities is not None
    console.print(f"{path}: valid; numerical_policy {c.identities.numerical_policy}", markup=False)


@contract_app.command("diff")
def contract_diff(one: Path, other: Path) -> None:
    """What differs between two contracts, and which identity it moves. Exit code 1 if anything does."""
    import contract

    found = contract.differences(contract.load(one), contract.load(other))
    if not found.identical:
        _print_changes(found)
        raise typer.Exit(1)
    console.print("the contracts are the same")


def _print_changes(found: Any) -> None:
    rows = [
        dict(path=c.path, kind=c.kind, before=c.before, after=c.after, moves=", ".join(c.moves) or "no identity")
        for c in found.changes
    ]
    _show(rows, f"moved: {', '.join(found.moved) or 'no identity'}", False)


def _check_arch(arch: str) -> None:
    from isojax.errors import Unsupported
    from isojax.region import ARCHS

    if arch not in ARCHS:
        raise Unsupported("isojax", f"arch {arch!r}", ", ".join(ARCHS), "pass --arch cpu or --arch sm90")


if __name__ == "__main__":
    main()
