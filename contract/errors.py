"""What a refusal looks like: every one names the entry, the rule, what was given, what is allowed and the mend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    entry: the part of the contract or of the runtime at fault, e.g. `composition norms.rms [engine_decode]`.
    rule: the rule's short name, stable, so that tests and tools can match on it.
    given: what was found.   allowed: what the rule asks for.   mend: what to do about it.
    """

    entry: str
    rule: str
    given: str
    allowed: str
    mend: str

    def __str__(self) -> str:
        return f"{self.entry}: {self.given} [{self.rule}: {self.allowed}] -> {self.mend}"


class ContractError(ValueError):
    """A contract that breaks its rules, or a file that does not hold one. `findings` has one item a broken rule."""

    title = "contract refused"

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        # The findings themselves are the argument: exceptions cross process boundaries by pickle, which replays args.
        super().__init__(self.findings)

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(finding.rule for finding in self.findings)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.title} ({len(self.findings)} finding(s)):", *map(str, self.findings)])


class AdapterRefusal(ContractError):
    """A runtime that may not run under its contract. Raised before anything is installed or compared, never warned."""

    title = "runtime refused"
