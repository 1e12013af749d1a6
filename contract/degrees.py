"""Parallel degrees against topology claims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from contract.errors import Finding
from contract.schema import Axis, Contract, TopologyClaim

AXES: tuple[str, ...] = get_args(Axis)


def neutral_degree(axis: str) -> int:
    """The degree at which an axis is not used: 1, and 0 for `sp`, which is a switch."""
    return 0 if axis == "sp" else 1


def check_degrees(contract: Contract, degrees: Mapping[str, int], *, runtime: str) -> Iterator[Finding]:
    """A finding for each axis whose degree no claim covers.

    An axis without a claim may only be unused. A claimed axis whose degree is not given is a finding too: what is not
    reported cannot be checked.
    """
    claims: dict[str, TopologyClaim] = {claim.axis: claim for claim in contract.topology}
    for axis, degree in degrees.items():
        given = f"{runtime} runs degree {degree!r}"
        if axis not in AXES:
            yield Finding(f"axis {axis}", "degree", given, f"axes {', '.join(AXES)}", "name it as the contract does")
        elif axis in claims:
            if not _is_one_of(degree, claims[axis].degrees):
                mend = "use one of these, or gate this degree and seal a contract that claims it"
                yield Finding(f"axis {axis}", "degree", given, _allowed(claims[axis]), mend)
        elif not _is_one_of(degree, (neutral_degree(axis),)):
            allowed = f"no claim on this axis, so only {neutral_degree(axis)}"
            yield Finding(f"axis {axis}", "degree", given, allowed, "use that, or gate the axis and claim it")
    for axis in sorted(claims.keys() - degrees.keys()):
        mend = f"pass the degree that {runtime} runs, {neutral_degree(axis)} if it does not use the axis"
        yield Finding(f"axis {axis}", "degree", "no degree given", _allowed(claims[axis]), mend)


def _is_one_of(degree: object, allowed: tuple[int, ...]) -> bool:
    return type(degree) in (int, bool) and degree in allowed  # bool, because sp is a switch; 1.0 is no degree


def _allowed(claim: TopologyClaim) -> str:
    return f"{claim.kind} at {', '.join(map(str, claim.degrees))}"
