"""Every rule that a contract has to keep, and the identities that it has to carry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from contract.errors import ContractError, Finding
from contract.identity import document, recompute
from contract.rules_claims import state_claims, tolerance_claims, topology_claims
from contract.rules_composition import (
    cases_have_their_meaning,
    differences_are_discharged,
    entries_are_complete,
    one_owner,
    order_is_canonical,
)
from contract.schema import SCHEMA_VERSION, Contract, Identities


def validate(contract: Contract) -> Contract:
    """`contract` itself, if it keeps every rule. Raises ContractError with a finding for each one that is broken."""
    findings = [finding for rule in RULES for finding in rule(contract)]
    if findings:
        raise ContractError(findings)
    return contract


def parse(data: Any, *, source: str = "document") -> Contract:
    """A contract from JSON-like data, checked for type and spelling only. Raises ContractError naming each field."""
    if not isinstance(data, dict):
        raise ContractError([Finding(source, "schema", f"a {type(data).__name__}", "one JSON object", _RESTORE)])
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        given = f"schema version {version!r}" if "schema_version" in data else "no schema_version"
        mend = "write the contract again with this version of the package, or read it with the version that wrote it"
        raise ContractError([Finding(source, "schema-version", given, f"version {SCHEMA_VERSION}", mend)])
    try:
        return Contract.model_validate(data)
    except ValidationError as error:
        raise ContractError(
            Finding(
                f"{source}: {'.'.join(map(str, item['loc'])) or 'document'}",
                "schema",
                item["msg"],
                "the fields and spellings of contract.schema",
                "correct the field, or restore the file from where it was sealed",
            )
            for item in error.errors()
        ) from None


def identities_are_stored(contract: Contract) -> Iterator[Finding]:
    """Stored identities equal recomputed ones, else the file was edited after it was sealed."""
    if contract.identities is None or contract.seal is None:
        yield Finding(
            "identities", "sealed", "no identities", "a contract carries its digests", "call contract.seal on it"
        )
        return
    live = recompute(contract)
    moved = [name for name in Identities.model_fields if getattr(contract.identities, name) != getattr(live, name)]
    for name in moved:
        yield Finding(
            f"identities {name}",
            "identities",
            f"stored {getattr(contract.identities, name)[:12]}, recomputed {getattr(live, name)[:12]}",
            "stored identities equal recomputed ones",
            _RESTORE,
        )
    if not moved and contract.seal != document(contract):
        yield Finding(
            "seal",
            "identities",
            "a field that no identity covers (a claim, a discharge, a name) was edited after sealing",
            "the seal is the hash of the whole document",
            _RESTORE,
        )


_RESTORE = "restore the file, or if the edit is meant, run its gates again and call contract.seal"

RULES = (
    cases_have_their_meaning,
    order_is_canonical,
    one_owner,
    entries_are_complete,
    differences_are_discharged,
    topology_claims,
    state_claims,
    tolerance_claims,
    identities_are_stored,
)
