"""What `isojax bench kernels` measured, as a document: `--json` writes it, `isojax bench show` reads it.

`schema` names the layout; a field that is added later gets a default, anything else gets a new number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field, model_validator

from contract import files
from isojax.errors import InputError

SCHEMA = "isojax.bench.kernels/1"
# What no measurement gives is refused, by whoever writes a report and by whoever reads one.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Least = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Machine(Frozen):
    """Where and with what it ran. clocks: MHz, W and C as nvidia-smi names them, before and after the timing."""

    gpu: str
    driver: str
    cuda: str
    date: str
    versions: dict[str, str]
    copy_bytes_per_us: Positive
    matmul_flops_per_us: Positive
    clocks_before: dict[str, str] = {}
    clocks_after: dict[str, str] = {}


class Row(Frozen):
    """One case. Times are medians in microseconds; a spread is the interquartile range over the median.

    error: why there is no time, '' where there is one. against: the peer; peer_us: None where there is none. by_rounds:
    the peer's time over ours, the median over the rounds in which both run once; None in older reports. memory: peak
    bytes beyond the operands, outputs included. distance: of the outputs from the peer's, relative L2. copy_us: of a
    device copy of as many bytes, where a case has no flops; copy_by_rounds: as by_rounds. at: see isojax.gates.bench.
    """

    region: str
    case: str
    model: str = ""
    part: str = ""
    at: dict[str, Annotated[int, Field(gt=0)]] = {}
    us: Positive | None = None
    spread: Least | None = None
    against: str = ""
    peer_us: Positive | None = None
    by_rounds: Positive | None = None
    peer_spread: Least | None = None
    bytes_us: Least = 0.0
    flops_us: Least = 0.0
    memory: int | None = None
    peer_memory: int | None = None
    copy_us: Positive | None = None
    copy_by_rounds: Positive | None = None
    distance: Least | None = None
    error: str = ""

    @model_validator(mode="after")
    def _time_or_error(self) -> Row:
        if (self.us is None) != bool(self.error):
            raise ValueError(f"{self.name} has to have either a time or an error")
        return self

    @computed_field
    @property
    def floor_us(self) -> float:
        """The larger of bytes over copy bandwidth and flops over matmul rate."""
        return max(self.bytes_us, self.flops_us)

    @computed_field
    @property
    def ratio(self) -> float | None:
        """Peer time over ours, by rounds where that is known: above 1 we are faster."""
        if self.us is None or self.peer_us is None:
            return None
        return self.by_rounds or self.peer_us / self.us

    @computed_field
    @property
    def bandwidth(self) -> float | None:
        """Part of the copy bandwidth that is reached, if every byte moves once."""
        return None if self.us is None else self.bytes_us / self.us

    @computed_field
    @property
    def of_copy(self) -> float | None:
        """Time of a copy of as many bytes over ours: 1 is as fast as a copy of this size."""
        if self.us is None or self.copy_us is None:
            return None
        return self.copy_by_rounds or self.copy_us / self.us

    @computed_field
    @property
    def efficiency(self) -> float | None:
        """Floor over our time: 1 is as fast as this device can be."""
        return None if self.us is None else self.floor_us / self.us

    @property
    def name(self) -> str:
        return f"{self.region}/{self.case}"


class Report(Frozen):
    """A run. seconds: wall time of its phases; one that is saved before its end has no "measure" yet."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    layout: Literal["isojax.bench.kernels/1"] = Field(default=SCHEMA, alias="schema")
    machine: Machine
    seconds: dict[str, float]
    rows: tuple[Row, ...] = Field(min_length=1)

    @property
    def finished(self) -> bool:
        return "measure" in self.seconds

    def save(self, path: Path) -> None:
        files.write(path, self.model_dump_json(indent=1, by_alias=True) + "\n")


def load(path: Path) -> Report:
    """Raises: InputError where the file is no report of this layout."""
    mend = "give a file that `isojax bench kernels --json` wrote"
    try:
        found = Report.model_validate_json(path.read_bytes())
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} is no {SCHEMA} report: {where}: {first['msg']}; {mend}") from None
    if "layout" not in found.model_fields_set:  # the default is for who makes a report, not for a file
        raise InputError(f"{path} is no {SCHEMA} report: it has no schema; {mend}")
    return found
