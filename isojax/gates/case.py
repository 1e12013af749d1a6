"""What a gate feeds to a region, and what it answers.

A region's maker, registered with `@region.gate_cases`, is `fn(rng, rows) -> Case | list`. The list holds Cases, which
go through the row gate, and pairs (name, custom gate) for claims of another kind: a custom gate is
`fn(Context) -> GateResult`, and brings its own negative control.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from isojax.errors import IsoError

BOUNDARY = 64  # the altered implementations of negative controls change their bits above this many rows


class GateBroken(IsoError, AssertionError):
    """A gate let an altered implementation pass: its other answers mean nothing."""


@dataclass(frozen=True)
class GateResult:
    """checked, differing: elements compared. Passed means that some were, and that none differs."""

    name: str
    checked: int
    differing: int
    negative_control_caught: bool
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.checked > 0 and self.differing == 0 and self.negative_control_caught


@dataclass(frozen=True)
class Case:
    """Operands of one call, as NumPy arrays (None where absent). Row operands, by `region.rows`, have `rows` rows.

    altered: the region computed by another implementation whose bits change with the number of rows, by one
      reassociation or one moved rounding: `fn(*args, **statics)` in jnp. The gate must catch it.
    exact: the region in float64 NumPy, for accuracy tests.
    """

    name: str
    args: tuple[Any, ...]
    statics: Mapping[str, Any] = field(default_factory=dict)
    altered: Callable[..., Any] | None = None
    exact: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Context:
    """What a custom gate gets. execute(region, args, statics) runs a region on `arch`, giving all outputs in NumPy."""

    arch: str
    quick: bool
    rng: np.random.Generator
    execute: Callable[..., tuple[np.ndarray, ...]]


Custom = tuple[str, Callable[[Context], GateResult]]
Maker = Callable[[np.random.Generator, int], Case | Sequence[Case | Custom]]


def ill_conditioned(rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16) -> np.ndarray:
    """Magnitudes log-uniform over 2^-12 .. 2^6 with random signs: sums of them depend on their order."""
    x = np.exp2(rng.uniform(-12, 6, shape)) * rng.choice([-1.0, 1.0], shape)
    return x.astype(jnp.dtype(dtype))


def many(x: Any) -> bool:
    """Whether an altered implementation should deviate: a wrong dependence on the number of rows."""
    return x.shape[0] > BOUNDARY
