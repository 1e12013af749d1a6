"""Gates of the embedding's gradient: a token's rows are added in ascending position, whatever stands between them, and
a gradient that is there already gets their sum in one addition."""

from __future__ import annotations

import numpy as np

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Context, GateResult, ill_conditioned
from isojax.pallas_kernels.embed import lookup_bwd

VOCAB, COLUMNS = 40, 192
WHOLE = 256  # columns that fall into whole blocks, as `into` takes them and frequent tokens need


@lookup_bwd.gate_cases
def cases(rng, rows):
    return [("order", order), ("into", into)]


def order(context: Context) -> GateResult:
    """The sum of float32 numbers in ascending position, computed on the host, in batches of many sizes; rows of other
    tokens put between change nothing."""
    total, caught = Diff(0, 0), False
    for rows, used in _batches(context):
        tokens, ct = _draw(context, rows, used, COLUMNS)
        run = lambda t, c: context.execute(lookup_bwd, (t, c), {"vocab": VOCAB})[0]
        got, want = run(tokens, ct), _added(tokens, ct)
        total = total + compare(got, want, f"{rows} rows ")
        at = np.sort(context.rng.permutation(rows + 64)[:rows])  # the same rows further apart
        apart, between = np.full(rows + 64, VOCAB - 1, np.int32), ill_conditioned(context.rng, rows + 64, COLUMNS)
        apart[at], between[at] = tokens, ct
        total = total + compare(run(apart, between)[: VOCAB - 1], want[: VOCAB - 1], f"{rows} rows, spread ")
        caught |= compare(run(tokens[::-1].copy(), ct[::-1].copy()), want).differing > 0  # control: descending
    return GateResult("embed.lookup_bwd/order", total.checked, total.differing, caught, total.first)


def into(context: Context) -> GateResult:
    """A given gradient plus the sums, added on the host; tokens without rows keep theirs."""
    total, descending, chained = Diff(0, 0), False, False
    for rows, used in _batches(context):
        tokens, ct = _draw(context, rows, used, WHOLE)
        given = ill_conditioned(context.rng, VOCAB, WHOLE, dtype=np.float32)
        run = lambda *args: context.execute(lookup_bwd, args, {"vocab": VOCAB})[0]
        fresh = _added(tokens, ct)
        want = given + fresh
        total = total + compare(run(tokens, ct), fresh, f"{rows} rows, fresh ")
        total = total + compare(run(tokens, ct, given), want, f"{rows} rows ")
        # controls: descending; every row added to the given gradient itself
        descending |= compare(run(tokens[::-1].copy(), ct[::-1].copy(), given), want).differing > 0
        chained |= compare(_added(tokens, ct, given), want).differing > 0
    return GateResult("embed.lookup_bwd/into", total.checked, total.differing, descending and chained, total.first)


def _batches(context: Context):
    """(rows, tokens that occur) of each batch."""
    return ((64, 40), (192, 3), (256, 1)) if context.quick else ((64, 40), (192, 3), (4096, 40), (4096, 2))


def _draw(context: Context, rows: int, used: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens below `used`, and their rows of the incoming gradient."""
    return context.rng.integers(0, used, rows).astype(np.int32), ill_conditioned(context.rng, rows, columns)


def _added(tokens: np.ndarray, ct: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Each token's rows added one after another, to zeros or to `start`."""
    out = np.zeros((VOCAB, ct.shape[1]), np.float32) if start is None else start.copy()
    for t, row in zip(tokens, ct.astype(np.float32), strict=True):
        out[t] += row
    return out
