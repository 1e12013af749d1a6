"""The contract against what a runtime really has: the same digest, taken over live values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from contract.canonical import canonical_bytes
from contract.frozen import Constants, Toolchain
from contract.identity import numerical_policy
from contract.schema import CompositionEntry, Contract, Implementation


@dataclass(frozen=True, slots=True)
class RegionView:
    """What a runtime would run for a region. Python floats among `constants` become bit patterns.

    Raises ValueError for constants or toolchain versions that a contract could not hold.
    """

    implementation: Implementation
    constants: Mapping[str, Any] = field(default_factory=Constants)
    artifact: str | None = None
    toolchain: Mapping[str, str] = field(default_factory=Toolchain)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", Constants.of(self.constants))
        object.__setattr__(self, "toolchain", Toolchain(self.toolchain))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first field in which a live region differs from the contract."""

    region: str
    case: str
    field: str
    live: Any
    contract: Any


def find_view(registry_view: Mapping[str, RegionView], region: str, case: str) -> RegionView | None:
    """The view of a region; a key `region@case` wins, for a region whose kernel differs between cases."""
    return registry_view.get(f"{region}@{case}") or registry_view.get(region)


def live_policy(contract: Contract, views: Mapping[tuple[str, str], RegionView]) -> str:
    """`numerical_policy` of `contract` with the live values of each (region, case) in `views` in place of its own."""
    composition = [
        _live_entry(entry, case, views[region, case]) if (region, case) in views else entry.evolve(cases=(case,))
        for region, case, entry in contract.owners()
    ]
    toolchains = [view.toolchain for view in views.values() if view.toolchain != contract.toolchain]
    toolchain = toolchains[0] if toolchains else contract.toolchain
    return numerical_policy(contract.evolve(composition=composition, toolchain=toolchain))


def _live_entry(entry: CompositionEntry, case: str, view: RegionView) -> CompositionEntry:
    return entry.evolve(
        cases=(case,), impl=view.implementation, constants=Constants.of(view.constants), artifact=view.artifact
    )


def live_differences(contract: Contract, views: Mapping[tuple[str, str], RegionView]) -> list[Difference]:
    """One difference for each (region, case) that has any, in order of region and case."""
    found = []
    for (region, case), view in sorted(views.items()):
        entry = contract.owner(region, case)
        if entry is not None:
            found.extend(_first_difference(region, case, _named(view), _named(_as_view(entry, contract))))
    return found


def _first_difference(region: str, case: str, live: dict[str, Any], held: dict[str, Any]) -> Iterable[Difference]:
    for name in dict.fromkeys([*held, *live]):
        one, other = live.get(name, "absent"), held.get(name, "absent")
        if canonical_bytes(one) != canonical_bytes(other):
            yield Difference(region, case, name, one, other)
            return


def _as_view(entry: CompositionEntry, contract: Contract) -> RegionView:
    return RegionView(entry.impl, entry.constants, entry.artifact, contract.toolchain)


def _named(view: RegionView) -> dict[str, Any]:
    return {
        "implementation.id": view.implementation.id,
        "implementation.version": view.implementation.version,
        "implementation.arch": view.implementation.arch,
        **{f"constants.{key}": value for key, value in view.constants.items()},
        **{f"toolchain.{key}": value for key, value in view.toolchain.items()},
        # Last, because the artifact moves whenever anything before it does: the cause is the better name.
        "artifact": view.artifact,
    }
