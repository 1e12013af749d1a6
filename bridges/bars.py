"""Bars of whole runtimes: the column `bar` of a table says what is asked of a row, and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import typer

MISSED, DOUBT = "MISSED", "in doubt"


def verdict(asked: str, met: bool | None) -> str:
    """The cell of a row that is judged; one that is not has ''. met: None where the figures do not tell."""
    return f"<= {asked}: {DOUBT if met is None else 'met' if met else MISSED}"


def unmet(rows: Iterable[Mapping[str, Any]]) -> str:
    """Why a table does not show that the bars are met, or ''."""
    judged = [r for r in rows if r["bar"]]
    if not judged:
        return "no bar was judged: figures of a machine without a GPU are no claim"
    short = {MISSED: "missed", DOUBT: "in doubt"}
    return ", ".join(f"{short[end]}: {r['what']}" for r in judged for end in short if r["bar"].endswith(end))


def require(rows: Iterable[Mapping[str, Any]], strict: bool) -> None:
    """What a command's --strict asks: ends it with exit code 1, and a reason, unless the bars are met."""
    if strict and (why := unmet(rows)):
        typer.echo(f"isojax: --strict: {why}", err=True)
        raise typer.Exit(1)
