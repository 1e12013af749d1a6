"""`isojax bench ...`. Exit codes: 1, a case failed (with --strict: or a bar was missed); the others as everywhere."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isojax.errors import InputError

app = typer.Typer(no_args_is_help=True, help="Speeds against native peers and floors, each with its bar.")


def joined() -> typer.Typer:
    """The sub-app with the commands of other packages.

    They join through the entry-point group `isojax.bench` (pyproject.toml), as commands do through `isojax.commands`:
    `engine = "bridges.vllm.bench:engine"` adds `isojax bench engine`. The function's module is imported by every call
    of `isojax`, so it leaves heavy imports to the function's body; the function is an ordinary typer command.
    """
    for entry in importlib.metadata.entry_points(group="isojax.bench"):
        app.command(name=entry.name)(entry.load())
    return app


Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page with plots.")]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write tables, or renew the marked part of a page that exists.")
]
Plots = Annotated[Path | None, typer.Option("--plots", help="Folder for the SVGs that --markdown links.")]
Brief = Annotated[bool, typer.Option("--brief", help="Print the bars, not every case.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 where a bar is missed, too, or none was judged.")]


@app.command()
def kernels(
    region: Annotated[list[str] | None, typer.Argument(help="Regions; every one with an entry if left out.")] = None,
    match: Annotated[str, typer.Option(help="Regular expression over REGION/CASE.")] = "",
    json: Annotated[Path | None, typer.Option("--json", help="Write the report; - is stdout.", allow_dash=True)] = None,
    html: Html = None,
    markdown: Markdown = None,
    plots: Plots = None,
    brief: Brief = False,
    strict: Strict = False,
    dry: Annotated[bool, typer.Option("--dry", help="Lower every kernel, launch none; needs no GPU.")] = False,
    load: Annotated[list[str] | None, typer.Option(help="Module that defines regions of yours; repeatable.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Compiling processes; one per core if left out.")] = None,
) -> None:
    """Every kernel against its native peer and the floor, in one run on a Hopper GPU."""
    outputs = [name for name, path in (("json", json), ("html", html), ("markdown", markdown)) if path is not None]
    if dry and outputs:
        raise InputError(f"--dry measures nothing, so there is nothing for --{outputs[0]}; leave one of them out")
    _check(json, html, markdown, plots)
    _host_only()
    from isojax import doctor
    from isojax.bench import kernels as table
    from isojax.region import load_modules

    load_modules(load or [])
    chosen = table.choose(region or [], match)
    if not dry:
        doctor.require_sm90("pass --dry to lower kernels without one")
    with _progress() as progress:
        if dry:
            plans, errors = table.compiled(chosen, lambda plan: len(plan.launches()), progress, load or [], workers)
        else:
            import torch

            keep = (lambda report: report.save(json)) if json is not None and str(json) != "-" else (lambda _: None)
            report = table.run(chosen, torch.device("cuda", 0), progress, load or [], workers, keep)
    if dry:
        for job, error in errors.items():
            typer.echo(f"{job.region}/{job.case}: {error}", err=True)
        typer.echo(f"{len(plans)} of {len(chosen)} cases lowered, {sum(plans.values())} kernels")
        raise typer.Exit(1 if errors else 0)
    _write(report, json, html, markdown, plots, brief)
    _exit(report, strict)


@app.command()
def show(
    report: Annotated[Path, typer.Argument(help="What `isojax bench kernels --json FILE` wrote.")],
    html: Html = None,
    markdown: Markdown = None,
    plots: Plots = None,
    brief: Brief = False,
    strict: Strict = False,
) -> None:
    """Tables and plots of an earlier run; needs no GPU."""
    from isojax.bench.result import load
    from isojax.bench.sections import sections

    _check(None, html, markdown, plots)
    found = load(report)
    sections(found.rows)  # refused before a figure of it is shown
    _write(found, None, html, markdown, plots, brief)
    _exit(found, strict)


def _check(json: Path | None, html: Path | None, markdown: Path | None, plots: Path | None) -> None:
    """Refuse outputs that could not be written before minutes are spent on them."""
    from isojax import outputs
    from isojax.bench.markdown import check_page

    if plots is not None and markdown is None:
        raise InputError("--plots holds what --markdown links; give --markdown FILE too")
    for path in (None if str(json) == "-" else json, html, markdown):
        if path is not None:
            outputs.check(path)
    if markdown is not None:
        check_page(markdown)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise InputError(f"{plots} is a file; --plots takes a folder, which is made where there is none")


def _host_only() -> None:
    """Keep JAX off the GPU, here and in the workers: it would reserve most of its memory, and only lowers."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def advance(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done)

        yield advance


def _write(
    report: Any, json: Path | None, html: Path | None, markdown: Path | None, plots: Path | None, brief: bool
) -> None:
    from isojax.bench import html as page
    from isojax.bench import markdown as text
    from isojax.bench import terminal

    if json is not None and str(json) == "-":
        typer.echo(report.model_dump_json(indent=1, by_alias=True))
    else:
        terminal.show(report, Console(width=max(Console().width, 140)), brief)
        if json is not None:
            report.save(json)
    if html is not None:
        page.write(report, html)
    if markdown is not None:
        text.write(report, markdown, plots)


def _exit(report: Any, strict: bool) -> None:
    from isojax.bench.bars import unmet

    why = unmet(report) if strict else ""
    if why:
        typer.echo(f"isojax: --strict: {why}", err=True)
    if why or any(r.error for r in report.rows):
        raise typer.Exit(1)
