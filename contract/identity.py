"""The three digests, and sealing.

Each is taken over sets sorted by their own canonical bytes, so neither the order of entries nor the way in which
cases are grouped into entries can move one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contract.canonical import canonical_bytes, digest
from contract.schema import Contract, Identities


def recompute(contract: Contract) -> Identities:
    """The identities that the content of `contract` has, whatever is stored in it."""
    return Identities(
        semantic=semantic(contract),
        numerical_policy=numerical_policy(contract),
        deployment=deployment(contract),
    )


def semantic(contract: Contract) -> str:
    """What is computed: the region vocabulary, the cases and the model family."""
    return _digest(
        "semantic",
        model_family=contract.model_family,
        regions=list(contract.regions),
        cases=_unordered(case.plain() for case in contract.cases),
    )


def numerical_policy(contract: Contract) -> str:
    """Every choice that decides bits: per (region, case) the implementation, constants and artifact; the toolchain;
    the plan of each pinned axis."""
    return _digest(
        "numerical_policy",
        arch=contract.arch,
        toolchain=contract.toolchain,
        owners=_unordered(
            [region, case, entry.impl.plain(), entry.constants, entry.artifact]
            for region, case, entry in contract.owners()
        ),
        pinned=_unordered(
            [claim.axis, sorted(claim.degrees), claim.plan] for claim in contract.topology if claim.kind == "pinned"
        ),
    )


def deployment(contract: Contract) -> str:
    """Choices that decide only speed."""
    return _digest("deployment", deployment=contract.deployment)


def document(contract: Contract) -> str:
    """The seal: everything but the identities and the seal itself, in canonical order."""
    content = arranged(contract).plain()
    return _digest("document", **{key: value for key, value in content.items() if key not in ("identities", "seal")})


def arranged(contract: Contract) -> Contract:
    """The same contract in the order that `validate` asks for."""
    entries = (entry.evolve(cases=sorted(entry.cases)) for entry in contract.composition)
    claims = (claim.evolve(degrees=sorted(claim.degrees)) for claim in contract.topology)
    states = (claim.evolve(invalidated_by=sorted(claim.invalidated_by)) for claim in contract.state)
    tolerances = (
        claim.evolve(case_pair=sorted(claim.case_pair), attributed_to=sorted(claim.attributed_to))
        for claim in contract.tolerance
    )
    return contract.evolve(
        cases=sorted(contract.cases, key=lambda case: (case.id, _sort_key(case))),
        composition=sorted(entries, key=lambda entry: (entry.region, entry.cases, _sort_key(entry))),
        topology=sorted(claims, key=lambda claim: (claim.axis, _sort_key(claim))),
        state=sorted(states, key=lambda claim: (claim.state_id, _sort_key(claim))),
        tolerance=sorted(tolerances, key=lambda claim: (claim.case_pair, _sort_key(claim))),
    )


def seal(contract: Contract) -> Contract:
    """`contract` in canonical order with its identities and seal filled in. Says nothing about whether it is valid."""
    contract = arranged(contract)
    return contract.evolve(identities=recompute(contract), seal=document(contract))


def _digest(kind: str, **content: Any) -> str:
    # The kind is part of the bytes, so that equal content under two kinds never shares a digest.
    return digest({"digest": f"isojax.contract.{kind}.v1", **content})


def _unordered(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=canonical_bytes)


def _sort_key(part: Any) -> bytes:
    return canonical_bytes(part.plain())
