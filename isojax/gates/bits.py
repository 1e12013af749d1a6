"""Comparison of arrays by their bits: NaN payloads and -0.0 count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Diff:
    """checked, differing: elements. first: where the first difference is, as text; empty where there is none."""

    checked: int
    differing: int
    first: str = ""

    def __add__(self, other: Diff) -> Diff:
        return Diff(self.checked + other.checked, self.differing + other.differing, self.first or other.first)


def integers(a: Any) -> np.ndarray:
    """The array's bits as unsigned integers of the same width."""
    a = np.ascontiguousarray(np.asarray(a))
    return a.view(f"u{a.dtype.itemsize}")


def compare(got: Any, want: Any, label: str = "") -> Diff:
    """Count the elements whose bits differ. Raises ValueError where shapes or dtypes differ."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise ValueError(f"{label}: cannot compare {got.dtype}{got.shape} with {want.dtype}{want.shape}")
    a, b = integers(got), integers(want)
    unequal = a != b
    count = int(np.count_nonzero(unequal))
    if not count:
        return Diff(a.size, 0)
    at = tuple(int(i) for i in np.argwhere(unequal)[0])
    digits = 2 * got.dtype.itemsize
    return Diff(a.size, count, f"{label}{list(at)}: {got[at]} 0x{a[at]:0{digits}x}, {want[at]} 0x{b[at]:0{digits}x}")


def compare_all(got: Sequence[Any], want: Sequence[Any], label: str = "") -> Diff:
    """Compare two lists of outputs, one after the other."""
    if len(got) != len(want):
        raise ValueError(f"{label}: {len(got)} outputs against {len(want)}")
    total = Diff(0, 0)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        total = total + compare(g, w, f"{label}output {i} ")
    return total
