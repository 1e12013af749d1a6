"""What the commands of the bridges show in a terminal: that they run, and a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def running(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error while the block runs; call what it gives to say where it is.

    Where standard error is no terminal, a line for each thing said: what a run that was cut off had come to.
    """
    if not sys.stderr.isatty():
        yield lambda text: print(f"{what}: {text}", file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def show(title: str, rows: Sequence[dict[str, Any]]) -> Console:
    """Print rows of the same keys as a table, at least 100 columns wide; returns the console for what follows."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(str, row.values()))
    console = Console(width=max(Console().width, 100))
    console.print(table)
    return console
