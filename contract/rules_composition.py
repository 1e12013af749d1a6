"""Rules on cases and composition: who owns what, in which order, and which differences need evidence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations

from contract.cases import CASES
from contract.errors import Finding
from contract.schema import CompositionEntry, Contract

REQUIRED_TOOLCHAIN = ("jax", "jaxlib")  # both take part in lowering, so both can change bits


def entry_name(region: str, *cases: str) -> str:
    return f"composition {region} [{', '.join(cases)}]"


def cases_have_their_meaning(contract: Contract) -> Iterator[Finding]:
    for case_id, count in Counter(case.id for case in contract.cases).items():
        if count > 1:
            yield Finding(
                f"case {case_id}", "case-unique", f"declared {count} times", "each case once", "remove the duplicates"
            )
    for case in contract.cases:
        if case != CASES[case.id]:
            yield Finding(
                f"case {case.id}",
                "case-meaning",
                f"declared as {case.plain()}",
                f"the one meaning of this id, {CASES[case.id].plain()}",
                f"use contract.CASES[{case.id!r}]",
            )
    owned = {case for _, case, _ in contract.owners()}
    for case_id in sorted({case.id for case in contract.cases} - owned):
        yield Finding(
            f"case {case_id}",
            "case-covered",
            "no region is owned in it",
            "a declared case is covered",
            "add entries for it, or drop the case",
        )
    for part, present in (("cases", contract.cases), ("composition", contract.composition)):
        if not present:
            yield Finding(part, "not-empty", "empty", "a contract covers something", f"add {part}")


def order_is_canonical(contract: Contract) -> Iterator[Finding]:
    mend = "call contract.seal, which sorts"
    listings = {
        "cases": [case.id for case in contract.cases],
        "composition": [(entry.region, entry.cases) for entry in contract.composition],
        "topology": [claim.axis for claim in contract.topology],
        "state": [claim.state_id for claim in contract.state],
        "tolerance": [claim.case_pair for claim in contract.tolerance],
    }
    for name, keys in listings.items():
        if keys != sorted(keys):
            yield Finding(name, "sorted", "entries out of order", "one order, so that files can be compared", mend)


def one_owner(contract: Contract) -> Iterator[Finding]:
    declared = {case.id for case in contract.cases}
    for entry in contract.composition:
        name = entry_name(entry.region, *entry.cases)
        if not entry.cases:
            yield Finding(name, "entry-cases", "no case", "an entry owns its region in some case", "name the cases")
        if list(entry.cases) != sorted(set(entry.cases)):
            yield Finding(
                name, "entry-cases", "cases repeat or are out of order", "sorted, each once", "sort them, drop repeats"
            )
        for case in sorted(set(entry.cases) - declared):
            yield Finding(
                name,
                "case-declared",
                f"case {case} is not declared",
                f"cases of this contract: {', '.join(sorted(declared)) or 'none'}",
                f"add contract.CASES[{case!r}] to cases, or drop it here",
            )
    owners: dict[tuple[str, str], list[CompositionEntry]] = defaultdict(list)
    for entry in contract.composition:
        for case in set(entry.cases):
            owners[entry.region, case].append(entry)
    for (region, case), held in sorted(owners.items()):
        if len(held) > 1:
            yield Finding(
                entry_name(region, case),
                "one-owner",
                f"owned by {len(held)} entries: {', '.join(str(entry.impl) for entry in held)}",
                "exactly one owner per (region, case)",
                "keep one of them for this case",
            )


def entries_are_complete(contract: Contract) -> Iterator[Finding]:
    for entry in contract.composition:
        name = entry_name(entry.region, *entry.cases)
        if entry.impl.arch != contract.arch:
            yield Finding(
                name,
                "one-arch",
                f"implementation {entry.impl}",
                f"the contract's arch, {contract.arch}: cpu and sm90 round differently",
                f"use the {contract.arch} implementation, or write a contract for {entry.impl.arch}",
            )
        if entry.route == "composition_defining" and entry.artifact is None:
            yield Finding(
                name,
                "artifact",
                "no artifact",
                "an entry that defines the composition names the hash of what was lowered",
                "lower the region on its canonical shapes and store the hash",
            )
        if entry.route == "native" and not _tolerated(contract, entry):
            yield Finding(
                name,
                "native-tolerance",
                "native route without a tolerance claim",
                "a native kernel is excused by a tolerance claim that is attributed to its region",
                f"measure the difference and attribute it to {entry.region}, or take the contract's kernel",
            )
    if any(entry.route == "composition_defining" for entry in contract.composition):
        for package in REQUIRED_TOOLCHAIN:
            if package not in contract.toolchain:
                yield Finding(
                    f"toolchain {package}",
                    "toolchain",
                    "no version",
                    "versions that can change bits are pinned",
                    f"add the installed version of {package}",
                )


def differences_are_discharged(contract: Contract) -> Iterator[Finding]:
    by_region: dict[str, dict[str, CompositionEntry]] = defaultdict(dict)
    for region, case, entry in contract.owners():
        by_region[region].setdefault(case, entry)
    declared = {case.id for case in contract.cases}
    for region, owners in sorted(by_region.items()):
        yield from _unequal_pairs(region, owners)
        absent = sorted(declared - set(owners))
        for entry in dict.fromkeys(owners.values()):
            if absent and entry.discharge is None:
                yield Finding(
                    entry_name(region, *entry.cases),
                    "discharge",
                    f"the region is absent from {', '.join(absent)}, so other arithmetic runs there",
                    "a region that not every case runs needs a discharge",
                    "own it there too, or add a discharge: gate (against what runs there) or neutral (does not matter)",
                )
    for entry in contract.composition:
        if entry.discharge and entry.discharge.kind == "tolerance" and not _tolerated(contract, entry):
            yield Finding(
                entry_name(entry.region, *entry.cases),
                "discharge-tolerance",
                "discharged by tolerance, but no tolerance claim names the region for one of these cases",
                "bits that differ are bounded by a claim",
                f"add a tolerance claim attributed to {entry.region}, or prove equality with a gate",
            )


def _unequal_pairs(region: str, owners: dict[str, CompositionEntry]) -> Iterator[Finding]:
    reported: set[frozenset[CompositionEntry]] = set()
    for (one, first), (two, second) in combinations(sorted(owners.items()), 2):
        pair = frozenset((first, second))
        if pair in reported or first.arithmetic == second.arithmetic or first.discharge or second.discharge:
            continue
        reported.add(pair)  # once per pair of entries, however many cases they own
        yield Finding(
            entry_name(region, one, two),
            "discharge",
            f"{one} and {two} differ in {', '.join(_differing(first, second))}",
            "entries of one region that differ between cases need a discharge",
            "run the gate that compares the two and name it in one entry's discharge, or use one implementation",
        )


def _differing(first: CompositionEntry, second: CompositionEntry) -> list[str]:
    return [name for name in ("impl", "constants", "artifact") if getattr(first, name) != getattr(second, name)]


def _tolerated(contract: Contract, entry: CompositionEntry) -> bool:
    return any(
        entry.region in claim.attributed_to and set(claim.case_pair) & set(entry.cases) for claim in contract.tolerance
    )
