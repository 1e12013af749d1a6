"""What an adapter checks before it installs: cases, regions and live arithmetic against the contract."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from contract.degrees import check_degrees
from contract.errors import Finding
from contract.live import RegionView, find_view, live_differences, live_policy
from contract.schema import Contract

RegionsUsed = Collection[str] | Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True)
class InstallRequest:
    """What a runtime asks for. Raises TypeError for a lone string where names are meant: it is a list of letters."""

    runtime: str
    contract: Contract
    registry_view: Mapping[str, RegionView]
    cases: Collection[str]
    regions_used: RegionsUsed
    degrees: Mapping[str, int]

    @property
    def used(self) -> list[tuple[str, str]]:
        """(region, case), sorted."""
        per_case = self.regions_used if isinstance(self.regions_used, Mapping) else None
        regions = {
            case: self.regions_used if per_case is None else per_case.get(case, ()) for case in names(self.cases)
        }
        return sorted((region, case) for case, used in regions.items() for region in names(used))

    @property
    def views(self) -> dict[tuple[str, str], RegionView]:
        """The live side of every used (region, case) that the contract owns and the registry has."""
        found = {key: find_view(self.registry_view, *key) for key in self.used if self.contract.owner(*key)}
        return {key: view for key, view in found.items() if view is not None}

    def findings(self) -> list[Finding]:
        """Every reason to refuse."""
        return [
            *self._unknown_cases(),
            *self._empty_cases(),
            *self._stray_cases(),
            *check_degrees(self.contract, self.degrees, runtime=self.runtime),
            *self._uncovered(),
            # Another arch differs in every region; one reason is enough.
            *(list(self._arch()) or self._identity()),
        ]

    def _unknown_cases(self) -> Iterator[Finding]:
        known = sorted(case.id for case in self.contract.cases)
        for case in names(self.cases):
            if case not in known:
                given, allowed = f"{self.runtime} asks for it", f"cases of {self.contract.name}: {', '.join(known)}"
                yield Finding(f"case {case}", "case", given, allowed, "use one of them, or extend the contract")

    def _empty_cases(self) -> Iterator[Finding]:
        busy = {case for _, case in self.used}
        idle = [f"case {case}" for case in names(self.cases) if case not in busy]
        for entry in idle if self.cases else ["install"]:
            allowed = "an installed case runs at least one region: an empty check proves nothing"
            yield Finding(entry, "regions", "no region", allowed, "pass the regions of the traced program")

    def _stray_cases(self) -> Iterator[Finding]:
        if isinstance(self.regions_used, Mapping):
            for case in sorted(set(self.regions_used) - set(self.cases)):
                allowed = f"cases asked for: {', '.join(names(self.cases)) or 'none'}"
                mend = "add it to case_ids, or drop its regions"
                yield Finding(f"case {case}", "regions", "has regions, but is not installed", allowed, mend)

    def _uncovered(self) -> Iterator[Finding]:
        known = {case.id for case in self.contract.cases}
        for region, case in self.used:
            if case not in known:
                continue  # already refused as a case
            if self.contract.owner(region, case) is None:
                owned = sorted(held for name, held, _ in self.contract.owners() if name == region)
                yield Finding(
                    at(region, case),
                    "coverage",
                    f"{self.runtime}'s program runs it, the contract has no owner for it",
                    f"cases in which it is owned: {', '.join(owned) or 'none'}",
                    "add the entry and its artifact to the contract, or take the region out of the program",
                )
            elif find_view(self.registry_view, region, case) is None:
                yield Finding(
                    at(region, case),
                    "coverage",
                    f"{self.runtime} has no implementation of it",
                    f"registered: {', '.join(sorted(self.registry_view)) or 'none'}",
                    "import the module that defines the region before installing",
                )

    def _arch(self) -> Iterator[Finding]:
        for (region, case), view in self.views.items():
            live, held = view.implementation, self.contract.arch
            if live.arch != held:
                mend = f"load the {live.arch} contract on both sides, or run on {held}"
                yield Finding(at(region, case), "arch", f"{self.runtime} runs {live}", f"arch {held}", mend)

    def _identity(self) -> list[Finding]:
        assert self.contract.identities is not None  # the adapter holds a valid contract, and that is sealed
        held, live = self.contract.identities.numerical_policy, live_policy(self.contract, self.views)
        if live == held:
            return []
        first, *others = live_differences(self.contract, self.views)
        more = f"; {len(others)} more (region, case) differ" if others else ""
        return [
            Finding(
                at(first.region, first.case),
                "identity",
                f"{first.field} is {first.live!r} in {self.runtime} (numerical_policy {live[:12]}){more}",
                f"{first.contract!r} (numerical_policy {held[:12]})",
                "run the versions that the contract names, or gate the live ones and seal a new contract",
            )
        ]


def names(given: Collection[str]) -> list[str]:
    """Sorted, each once. Raises TypeError for a lone string."""
    if isinstance(given, str):
        raise TypeError(f"a collection of names is needed, not the string {given!r}")
    return sorted(set(given))


def at(region: str, case: str) -> str:
    return f"region {region} [{case}]"
