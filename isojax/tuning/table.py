"""The file of measured choices: its form, what makes it valid, and how it is searched."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pydantic

from isojax.errors import IsoError
from isojax.pallas_kernels.linear.tiles import Tiles, misfit

Region = Literal["linear.column", "linear.row"]
type Key = tuple[str, int, tuple[tuple[str, int], ...]]


class TableError(IsoError, ValueError):
    """A tuning table is missing, truncated, of another device, or says what no kernel can do."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(_Strict):
    """Of a product over k in `leaves` leaves, with n columns of output."""

    n: int
    k: int
    leaves: int


class Choice(_Strict):
    """Tiles, field for field; what is left out is as in Tiles."""

    m: int
    n: int
    k: int
    groups: tuple[int, int]
    cluster: int = 1
    shared: Literal["x", "w"] = "x"
    snake: int = 8
    split: int = 1

    @property
    def tiles(self) -> Tiles:
        return Tiles(**dict(self))


class Entry(_Strict):
    """The fastest tiles of one region at one shape and row count. us, rule_us: medians, with them and by the rule."""

    region: Region
    shape: Shape
    rows: int = pydantic.Field(gt=0)
    choice: Choice
    us: float = pydantic.Field(gt=0)
    rule_us: float = pydantic.Field(gt=0)

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Entry:
        wrong = misfit(self.choice.tiles, **dict(self.shape))
        if wrong:
            raise ValueError(f"{self.region} {dict(self.shape)} at {self.rows} rows: {wrong}")
        return self

    @property
    def key(self) -> Key:
        return _key(self.region, self.rows, dict(self.shape))


class Table(_Strict):
    """device: the kind of GPU on which it was measured. made: date and versions, for people."""

    version: Literal[1] = 1
    device: str
    made: dict[str, str]
    entries: tuple[Entry, ...]

    @pydantic.model_validator(mode="after")
    def _once(self) -> Table:
        seen = set()
        for e in self.entries:
            if e.key in seen:
                raise ValueError(f"{e.region} {dict(e.shape)} at {e.rows} rows stands there twice")
            seen.add(e.key)
        return self

    @functools.cached_property
    def _index(self) -> dict[Key, Tiles]:
        return {e.key: e.choice.tiles for e in self.entries}

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def find(self, region: str, rows: int, shape: Mapping[str, int]) -> Tiles | None:
        """The entry of exactly this shape and row count; it says nothing of others, where the rule may be better."""
        return self._index.get(_key(region, rows, shape))


def _key(region: str, rows: int, shape: Mapping[str, int]) -> Key:
    return region, rows, tuple(sorted(shape.items()))


def load(path: Path, device: str | None = None) -> Table:
    """Read and validate a table. device: the kind it must be of, where given.

    Raises: TableError, which names the file, what is wrong and what mends it.
    """
    mend = "restore it, or delete it and make it anew with `isojax tune`"
    try:
        table = Table.model_validate_json(path.read_bytes())
    except OSError as e:
        raise TableError(f"{path}: {e.strerror}; {mend}") from e
    except pydantic.ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise TableError(f"{path}: {where or 'the file'}: {first['msg']}; {mend}") from e
    if device is not None and table.device != device:
        raise TableError(f"{path}: measured on {table.device!r}, but this is {device!r}; {mend}")
    return table


def dump(table: Table) -> str:
    """JSON with one entry a line, so that differences can be read."""
    lines = ",\n".join("  " + e.model_dump_json(exclude_defaults=True) for e in table.entries)
    head = table.model_dump_json(exclude={"entries"})[1:-1]
    return "{" + head + ',"entries":[\n' + lines + "\n]}\n"
