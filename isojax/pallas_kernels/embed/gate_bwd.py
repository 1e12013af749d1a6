"""Gate of the embedding's gradient: a token's rows are added in ascending position, whatever stands between them."""

from __future__ import annotations

import numpy as np

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Context, GateResult, ill_conditioned
from isojax.pallas_kernels.embed import lookup_bwd

VOCAB, COLUMNS = 40, 192


@lookup_bwd.gate_cases
def cases(rng, rows):
    return [("order", order)]


def order(context: Context) -> GateResult:
    """The sum of float32 numbers in ascending position, computed on the host, in batches of many sizes; rows of other
    tokens put between change nothing."""
    total, caught = Diff(0, 0), False
    for rows, used in ((64, 40), (192, 3), (256, 1)) if context.quick else ((64, 40), (192, 3), (4096, 40), (4096, 2)):
        tokens = context.rng.integers(0, used, rows).astype(np.int32)
        ct = ill_conditioned(context.rng, rows, COLUMNS)
        run = lambda t, c: context.execute(lookup_bwd, (t, c), {"vocab": VOCAB})[0]
        got, want = run(tokens, ct), np.zeros((VOCAB, COLUMNS), np.float32)
        for t, row in zip(tokens, ct.astype(np.float32), strict=True):
            want[t] += row
        total = total + compare(got, want, f"{rows} rows ")
        at = np.sort(context.rng.permutation(rows + 64)[:rows])  # the same rows further apart
        apart, between = np.full(rows + 64, VOCAB - 1, np.int32), ill_conditioned(context.rng, rows + 64, COLUMNS)
        apart[at], between[at] = tokens, ct
        total = total + compare(run(apart, between)[: VOCAB - 1], want[: VOCAB - 1], f"{rows} rows, spread ")
        caught |= compare(run(tokens[::-1].copy(), ct[::-1].copy()), want).differing > 0  # control: descending
    return GateResult("embed.lookup_bwd/order", total.checked, total.differing, caught, total.first)
