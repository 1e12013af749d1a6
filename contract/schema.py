"""The contract as a document: which implementation owns which region in which case, and under what claims.

Types and spelling are checked here; what entries owe each other is checked in `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StringConstraints

from contract.canonical import INT_LIMIT
from contract.frozen import Bounds, Constants, FrozenMap, Toolchain

SCHEMA_VERSION: Final = 1

CaseId = Literal["trainer_fwd", "trainer_score", "engine_prefill", "engine_decode", "jax_reference"]
Role = Literal["trainer", "engine", "reference"]
Arch = Literal["sm90", "cpu"]
Axis = Literal["tp", "sp", "ep", "cp", "pp", "dp"]
Route = Literal["composition_defining", "native"]

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RegionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/+-]*$")]
Words = Annotated[str, StringConstraints(pattern=r"\S")]  # free text that says something


class Part(BaseModel):
    """A frozen piece of the document. Unknown fields are refused: a misspelt one would silently pin nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def evolve(self, **changes: Any) -> Self:
        """A copy with other fields, checked again (pydantic's model_copy does not check). Raises ValidationError."""
        return type(self).model_validate({**dict(self), **changes})

    def plain(self) -> dict[str, Any]:
        """As JSON would load it."""
        return self.model_dump(mode="json")


class ExecutionCase(Part):
    """One way in which a token's log-probability is computed.

    state_mode: `none`, whole sequences from position 0; `prefill`, many new tokens over cached state; `decode`, one.
    """

    id: CaseId
    runtime_role: Role
    grad_mode: Literal["grad", "no_grad"]
    state_mode: Literal["none", "prefill", "decode"]


class Implementation(Part):
    """What executes a region: a kernel (`sm90`) or its reference schedule (`cpu`)."""

    id: Label
    version: Annotated[StrictInt, Field(ge=1, le=INT_LIMIT)]
    arch: Arch

    def __str__(self) -> str:
        return f"{self.id} v{self.version} ({self.arch})"


class Discharge(Part):
    """Evidence that a difference between cases is harmless.

    gate: a bit-equality gate compared the two sides, `ref` is its report or name.
    neutral: the region's output does not reach the compared log-probability (noise, gradients), `ref` says why.
    tolerance: the bits differ and a ToleranceClaim bounds by how much, `ref` names the measurement.
    """

    kind: Literal["gate", "neutral", "tolerance"]
    ref: Words


class CompositionEntry(Part):
    """Owner of one region in some cases. `artifact` is the SHA-256 of the lowered kernel or reference.

    route: `composition_defining`, the entry's own arithmetic is the definition; `native`, the runtime keeps its own
    kernel there, which only a tolerance claim can excuse.
    """

    region: RegionName
    cases: tuple[CaseId, ...]
    impl: Implementation
    constants: Constants = Constants()
    artifact: Sha256 | None = None
    route: Route = "composition_defining"
    discharge: Discharge | None = None

    @property
    def arithmetic(self) -> tuple[Any, ...]:
        """What decides the bits. Two entries that agree here are the same computation."""
        return self.impl, self.constants, self.artifact


class TopologyClaim(Part):
    """Degrees of one parallel axis under which the composition is proved. `sp` is a switch: 0 off, 1 on.

    invariant: every degree gives the same bits, within `domain` (which shapes), by `proof` (which gate).
    pinned: bits depend on the degree, so there is one, with its collective `plan`.
    """

    axis: Axis
    kind: Literal["pinned", "invariant"]
    degrees: tuple[Annotated[StrictInt, Field(ge=0, le=INT_LIMIT)], ...]
    domain: str | None = None
    proof: str | None = None
    plan: str | None = None


class StateClaim(Part):
    """State carried between steps: the events after which it must be dropped, and whether recomputing it gives the
    same bits (`replay_safe`), as shown by `ref`."""

    state_id: Label
    invalidated_by: tuple[Words, ...]
    replay_safe: StrictBool
    ref: Words


class ToleranceClaim(Part):
    """Two cases that are not bit-equal: by how much, which regions cause it, and where that was measured."""

    case_pair: tuple[CaseId, CaseId]
    bounds: Bounds
    attributed_to: tuple[RegionName, ...]
    measured_in: str = ""


class Identities(Part):
    """SHA-256 of what is computed (`semantic`), of every choice that decides bits (`numerical_policy`), and of the
    choices that decide only speed (`deployment`)."""

    semantic: Sha256
    numerical_policy: Sha256
    deployment: Sha256


class Contract(Part):
    """The whole document. `deployment` may change speed but never bits.

    `seal` is the SHA-256 of all other fields. It decides nothing at run time; it shows an edit that moves no identity
    (a widened claim, a looser bound).
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    name: Label
    model_family: Label
    arch: Arch
    cases: tuple[ExecutionCase, ...]
    composition: tuple[CompositionEntry, ...]
    topology: tuple[TopologyClaim, ...] = ()
    state: tuple[StateClaim, ...] = ()
    tolerance: tuple[ToleranceClaim, ...] = ()
    toolchain: Toolchain
    deployment: FrozenMap = FrozenMap()
    identities: Identities | None = None
    seal: Sha256 | None = None

    def owners(self) -> Iterator[tuple[str, CaseId, CompositionEntry]]:
        """Every (region, case) with its entry, in document order."""
        for entry in self.composition:
            for case in entry.cases:
                yield entry.region, case, entry

    def owner(self, region: str, case: str) -> CompositionEntry | None:
        """The entry of a valid contract that owns `region` in `case`, if any."""
        return next((entry for name, held, entry in self.owners() if (name, held) == (region, case)), None)

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({entry.region for entry in self.composition}))
