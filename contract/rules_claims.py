"""Rules on claims: each says where it holds, and carries what shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from contract.errors import Finding
from contract.schema import Contract, TopologyClaim


def topology_claims(contract: Contract) -> Iterator[Finding]:
    yield from _repeated("topology", "axis-unique", (claim.axis for claim in contract.topology))
    for claim in contract.topology:
        yield from _degrees(claim)
        needs = ("domain", "proof") if claim.kind == "invariant" else ("plan",)
        for field in needs:
            if not (getattr(claim, field) or "").strip():
                yield Finding(
                    f"topology {claim.axis}",
                    f"{claim.kind}-{field}",
                    f"no {field}",
                    f"{'an' if claim.kind == 'invariant' else 'a'} {claim.kind} claim needs a {field}",
                    _MEND[field],
                )


_MEND = {
    "domain": "say for which shapes the bits are equal, e.g. 'K divisible by 8 leaves'",
    "proof": "name the gate that compared the degrees",
    "plan": "name the collective plan that this degree fixes, e.g. 'ring all-reduce, fp32'",
}


def _degrees(claim: TopologyClaim) -> Iterator[Finding]:
    name = f"topology {claim.axis}"
    if not claim.degrees:
        yield Finding(name, "degrees", "no degree", "a claim holds at some degree", "list the degrees that were gated")
    if list(claim.degrees) != sorted(set(claim.degrees)):
        yield Finding(
            name, "degrees", f"degrees {claim.degrees}", "sorted, each once", "call contract.seal, drop repeats"
        )
    outside = [degree for degree in claim.degrees if not _possible(claim.axis, degree)]
    if outside:
        yield Finding(
            name,
            "degrees",
            f"degrees {outside}",
            "sp is 0 (off) or 1 (on)" if claim.axis == "sp" else "degrees start at 1",
            "remove them",
        )
    if claim.kind == "pinned" and len(claim.degrees) > 1:
        yield Finding(
            name,
            "pinned-degree",
            f"{len(claim.degrees)} degrees",
            "a pinned claim has one degree: elsewhere the bits differ",
            "keep one, or prove equality and claim invariant",
        )


def _possible(axis: str, degree: int) -> bool:
    return degree in (0, 1) if axis == "sp" else degree >= 1


def state_claims(contract: Contract) -> Iterator[Finding]:
    yield from _repeated("state", "state-unique", (claim.state_id for claim in contract.state))
    for claim in contract.state:
        if not claim.invalidated_by:
            yield Finding(
                f"state {claim.state_id}",
                "state-invalidation",
                "nothing invalidates it",
                "carried state is stale after some event, a weight sync at least",
                "list the events, e.g. 'weight_sync'",
            )
        elif list(claim.invalidated_by) != sorted(set(claim.invalidated_by)):
            yield Finding(
                f"state {claim.state_id}",
                "state-invalidation",
                "events repeat or are out of order",
                "sorted, each once",
                "call contract.seal, drop repeats",
            )


def tolerance_claims(contract: Contract) -> Iterator[Finding]:
    yield from _repeated("tolerance", "tolerance-unique", ("|".join(claim.case_pair) for claim in contract.tolerance))
    declared = {case.id for case in contract.cases}
    regions = set(contract.regions)
    for claim in contract.tolerance:
        name = f"tolerance {'|'.join(claim.case_pair)}"
        if len(set(claim.case_pair)) < 2:
            yield Finding(
                name,
                "tolerance-pair",
                "compares a case with itself",
                "two different cases: a runtime always agrees with its own rescoring",
                "name the trainer case and the engine case",
            )
        if list(claim.case_pair) != sorted(claim.case_pair):
            yield Finding(name, "tolerance-pair", "pair out of order", "sorted", "call contract.seal, which sorts")
        for case in sorted(set(claim.case_pair) - declared):
            yield Finding(
                name,
                "tolerance-pair",
                f"case {case} is not declared",
                "declared cases",
                "declare it, or drop the claim",
            )
        if not claim.bounds:
            yield Finding(
                name,
                "tolerance-bounds",
                "no bound",
                "a tolerance says how much",
                "add e.g. mean_abs and max_abs as bit patterns",
            )
        if not claim.measured_in.strip():
            yield Finding(
                name,
                "tolerance-measured",
                "no measurement",
                "a tolerance is measured, not guessed",
                "name the report in measured_in",
            )
        attributed = list(claim.attributed_to)
        if not attributed or attributed != sorted(set(attributed)):
            yield Finding(
                name,
                "tolerance-attributed",
                "attributed to nothing" if not attributed else "regions repeat or are out of order",
                "the regions that cause the difference, sorted, each once",
                "name them, call contract.seal",
            )
        for region in sorted(set(attributed) - regions):
            yield Finding(
                name,
                "tolerance-attributed",
                f"attributed to {region}, which the composition does not have",
                "regions of this contract",
                "correct the name, or add the region",
            )


def _repeated(part: str, rule: str, keys: Iterable[str]) -> Iterator[Finding]:
    for key, count in Counter(keys).items():
        if count > 1:
            yield Finding(
                f"{part} {key}", rule, f"claimed {count} times", "one claim each", "merge or remove the claims"
            )
