"""What differs between two contracts, field by field, and which identity each difference moves."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal

from contract.canonical import canonical_bytes
from contract.identity import arranged
from contract.schema import Contract

IdentityName = Literal["semantic", "numerical_policy", "deployment"]


@dataclass(frozen=True, slots=True)
class Change:
    """One field. `path` reads like `composition/norms.rms/engine_decode/constants/row_tile`.

    `before` is None where `kind` is "added", `after` where it is "removed". `moves` is empty for fields that no
    identity covers (names, claims' evidence, discharges).
    """

    path: str
    kind: Literal["added", "removed", "changed"]
    before: Any
    after: Any
    moves: tuple[IdentityName, ...]

    def __str__(self) -> str:
        moved = f"moves {', '.join(self.moves)}" if self.moves else "moves no identity"
        return f"{self.path}: {self.kind}, {self.before!r} -> {self.after!r} ({moved})"


@dataclass(frozen=True, slots=True)
class ContractDiff:
    """Changes sorted by path. Order of entries and their grouping into cases are not differences."""

    changes: tuple[Change, ...]

    @property
    def identical(self) -> bool:
        return not self.changes

    @property
    def moved(self) -> tuple[IdentityName, ...]:
        """Identities that differ."""
        return tuple(sorted({name for change in self.changes for name in change.moves}))


def differences(before: Contract, after: Contract) -> ContractDiff:
    """Every field that differs. Neither contract needs to be valid or sealed; stored digests are not compared."""
    old, new = _fields(before), _fields(after)
    changes = []
    for path in sorted(old.keys() | new.keys()):
        was, moves_before = old.get(path, (None, ()))
        now, moves_after = new.get(path, (None, ()))
        kind = "added" if path not in old else "removed" if path not in new else "changed"
        if kind == "changed" and canonical_bytes(was) == canonical_bytes(now):
            continue
        changes.append(Change(path, kind, was, now, tuple(sorted({*moves_before, *moves_after}))))
    return ContractDiff(tuple(changes))


_Moves = tuple[IdentityName, ...]
_SEMANTIC: _Moves = ("semantic",)
_POLICY: _Moves = ("numerical_policy",)
_DEPLOYMENT: _Moves = ("deployment",)


def _fields(contract: Contract) -> dict[str, tuple[Any, _Moves]]:
    fields: dict[str, tuple[Any, _Moves]] = {}
    for path, value, moves in _walk(arranged(contract)):
        fields[_numbered(path, fields)] = value, moves
    return fields


def _walk(contract: Contract) -> Iterator[tuple[str, Any, _Moves]]:
    yield "name", contract.name, ()
    yield "model_family", contract.model_family, _SEMANTIC
    yield "arch", contract.arch, _POLICY
    for case in contract.cases:
        yield f"cases/{case.id}", case.plain(), _SEMANTIC
    for region in contract.regions:
        yield f"regions/{region}", region, _SEMANTIC
    yield from _owners(contract)
    for claim in contract.topology:
        for field, value in claim.plain().items():
            # Only a pinned claim is part of the arithmetic: its one degree and its plan.
            decides = claim.kind == "pinned" and field in ("kind", "degrees", "plan")
            yield f"topology/{claim.axis}/{field}", value, _POLICY if decides else ()
    for claim in contract.state:
        yield f"state/{claim.state_id}", claim.plain(), ()
    for claim in contract.tolerance:
        yield f"tolerance/{'|'.join(claim.case_pair)}", claim.plain(), ()
    for package, version in contract.toolchain.items():
        yield f"toolchain/{_escape(package)}", version, _POLICY
    yield from _leaves("deployment", contract.deployment.plain())


def _owners(contract: Contract) -> Iterator[tuple[str, Any, _Moves]]:
    singles = [(region, case, entry.evolve(cases=(case,)).plain()) for region, case, entry in contract.owners()]
    seen: set[str] = set()
    for region, case, entry in sorted(singles, key=lambda single: (single[0], single[1], canonical_bytes(single[2]))):
        path = _numbered(f"composition/{region}/{case}", seen)
        seen.add(path)
        for field, value in entry["impl"].items():
            yield f"{path}/impl/{field}", value, _POLICY
        for key, value in entry["constants"].items():
            yield f"{path}/constants/{_escape(key)}", value, _POLICY
        yield f"{path}/artifact", entry["artifact"], _POLICY
        yield f"{path}/route", entry["route"], ()
        yield f"{path}/discharge", entry["discharge"], ()


def _numbered(path: str, taken: Container[str]) -> str:
    """`path`, or `path#2` and so on: only an invalid contract says a thing twice."""
    return next(name for name in chain([path], (f"{path}#{n}" for n in count(2))) if name not in taken)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any, _Moves]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}/{_escape(key)}", item)
    elif path != "deployment":
        yield path, value, _DEPLOYMENT


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")  # as JSON pointers do, so that no two keys share a path
