"""The base of both runtimes' adapters: install a contract, refuse what it does not cover, agree with the other side.

An adapter of a real runtime subclasses this and adds how it gathers the registry view and the parallel degrees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from contract.errors import AdapterRefusal, Finding
from contract.frozen import FrozenMap
from contract.install_checks import InstallRequest, RegionsUsed, at, names
from contract.ledger import Ledger
from contract.live import RegionView
from contract.schema import Contract, Identities
from contract.validate import validate


@dataclass(frozen=True, slots=True)
class Installed:
    """What one install covered. `unused` are regions that the contract owns in these cases but the program lacks."""

    regions: tuple[tuple[str, str], ...]
    degrees: FrozenMap
    numerical_policy: str
    unused: tuple[tuple[str, str], ...]


class Adapter:
    """Holds one runtime (`vllm`, `megatron`, `jax`) to one contract.

    registry_view: region -> what this runtime would run; `region@case` for a kernel of one case only.
    Raises ContractError if `contract` is not valid.
    """

    def __init__(
        self,
        runtime: str,
        contract: Contract,
        *,
        registry_view: Mapping[str, RegionView],
        ledger: Ledger | None = None,
    ) -> None:
        self.runtime = runtime
        self.contract = validate(contract)
        self.registry_view = dict(registry_view)
        self.ledger = Ledger() if ledger is None else ledger
        self._installed: set[tuple[str, str]] = set()

    @property
    def identities(self) -> Identities:
        assert self.contract.identities is not None  # validate refuses an unsealed contract
        return self.contract.identities

    def install(self, case_ids: Collection[str], regions_used: RegionsUsed, degrees: Mapping[str, int]) -> Installed:
        """Check that these cases, regions and degrees are what the contract covers, then record it.

        regions_used: the program's regions, one collection for all cases or one per case. degrees: by axis, every
        claimed axis included; `sp` is 0 or 1. Raises AdapterRefusal with every finding, and installs nothing, for an
        unknown case, an uncovered region, another arch, live arithmetic other than the contract's, or a degree
        outside the claims.
        """
        # Read once: a spent iterator would look like a program without regions.
        cases = names(case_ids)
        per_case = isinstance(regions_used, Mapping)
        used_by = {case: names(used) for case, used in regions_used.items()} if per_case else names(regions_used)
        request = InstallRequest(self.runtime, self.contract, self.registry_view, cases, used_by, degrees)
        findings = request.findings()
        if findings:
            self._refuse("install", findings)
        used = request.used
        held = {(region, case) for region, case, _ in self.contract.owners() if case in cases}
        installed = Installed(
            tuple(used),
            FrozenMap({k: int(v) for k, v in degrees.items()}),
            self.identities.numerical_policy,
            tuple(sorted(held - set(used))),
        )
        self.ledger.append("install", self._record(installed))
        self._installed.update(used)
        return installed

    def launched(self, region: str, case: str, module: str) -> None:
        """Record that the module with SHA-256 `module` ran. Raises AdapterRefusal unless its region is installed."""
        if (region, case) not in self._installed:
            allowed = "what was installed: " + (", ".join(sorted({name for name, _ in self._installed})) or "nothing")
            finding = Finding(at(region, case), "installed", "launched, not installed", allowed, "install it first")
            self._refuse("launch", [finding])
        self.ledger.launch(region, case, module)

    def handshake(
        self, other_identities: Identities | Mapping[str, Any], *, other_runtime: str | None = None
    ) -> Identities:
        """The other side's identities, if both sides compute the same thing with the same bits.

        `deployment` may differ, for it cannot change bits. Raises AdapterRefusal if `semantic` or `numerical_policy`
        differ, if nothing is installed here (stored digests alone prove nothing about the live runtime), or if the
        other side is this same runtime. Comparing both ledgers, region by region, comes on top of this once both
        sides have launched.
        """
        findings = []
        if not self._installed:
            findings.append(
                Finding("handshake", "installed", "nothing is installed", "install, then handshake", "call install")
            )
        if other_runtime == self.runtime:
            findings.append(
                Finding(
                    "handshake",
                    "two-runtimes",
                    f"both sides are {self.runtime}",
                    "two runtimes: one always agrees with itself",
                    "compare the trainer with the engine",
                )
            )
        other = self._parse_identities(other_identities)
        for name in ("semantic", "numerical_policy"):
            ours, theirs = getattr(self.identities, name), getattr(other, name)
            if ours != theirs:
                findings.append(
                    Finding(
                        f"identity {name}",
                        "handshake",
                        f"the other side has {theirs}",
                        f"{self.runtime} has {ours}",
                        "load the same contract on both sides; contract.differences names the fields that differ",
                    )
                )
        if findings:
            self._refuse("handshake", findings)
        same = other.deployment == self.identities.deployment
        self.ledger.append("handshake", {"identities": other.plain(), "other": other_runtime, "same_deployment": same})
        return other

    def _parse_identities(self, other: Identities | Mapping[str, Any]) -> Identities:
        try:
            return other if isinstance(other, Identities) else Identities.model_validate(dict(other))
        except (ValidationError, TypeError, ValueError):
            allowed = f"the digests {', '.join(Identities.model_fields)}"
            finding = Finding("identity", "handshake", f"received {other!r}", allowed, "send Identities.plain()")
            self._refuse("handshake", [finding])

    def _record(self, installed: Installed) -> dict[str, Any]:
        return {
            "runtime": self.runtime,
            "contract": self.contract.name,
            "identities": self.identities.plain(),
            "regions": [list(pair) for pair in installed.regions],
            "unused": [list(pair) for pair in installed.unused],
            "degrees": installed.degrees,
        }

    def _refuse(self, during: str, findings: Iterable[Finding]) -> NoReturn:
        refusal = AdapterRefusal(findings)
        self.ledger.append("refusal", {"during": during, "findings": [str(finding) for finding in refusal.findings]})
        raise refusal
