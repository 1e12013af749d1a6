"""Gates of backward regions: the gradients of rows, and the gradients of weights, which are sums over rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isojax.gates import rowgate
from isojax.gates.bits import Diff, compare
from isojax.gates.case import Case, Context, Custom, GateBroken, GateResult
from isojax.region import Region


def of_rows(region: Region, case: Case) -> Custom:
    """The region's first output goes through the row gate; the others need not be row outputs."""
    name = f"rows of {case.name}"

    def gate(context: Context) -> GateResult:
        batches = rowgate.QUICK_BATCHES if context.quick else rowgate.BATCHES
        tile = max(rowgate.TILE.values())  # what a trainer pads to, on either arch
        run = lambda args: context.execute(region, args, case.statics)[:1]
        controls = rowgate.controls(region, case, run, tile)
        for control, fn in controls.items():
            if not rowgate.check(region, case, fn, tile, batches, first_only=True).differing:
                raise GateBroken(f"{region.name}/{name}: the gate did not catch its negative control '{control}'")
        diff = rowgate.check(region, case, run, tile, batches)
        detail = diff.first or f"caught: {', '.join(controls)}"
        return GateResult(f"{region.name}/{name}", diff.checked, diff.differing, True, detail)

    return name, gate


def of_weights(region: Region, case: Case, zeroed: Sequence[str], rows: int = 192) -> Custom:
    """Rows without cotangents, appended to a batch, change no bit of the weights' gradients.

    zeroed: the cotangents among the operands. Control: the batch backwards, the same terms in another order.
    """
    name = f"weights of {case.name}"
    along = rowgate.row_operands(region)
    cotangents = {region.operands.index(z) for z in zeroed}

    def gate(context: Context) -> GateResult:
        def sums(pick: np.ndarray, live: int) -> list[np.ndarray]:
            args = list(case.args)
            for i in along:
                args[i] = case.args[i][pick]
                if i in cotangents:
                    args[i][live:] = 0
            return list(context.execute(region, args, case.statics)[1:])

        pool = len(case.args[along[0]])
        here = np.arange(rows) % pool
        want, total = sums(here, rows), Diff(0, 0)
        for more in (64, 512, 2048):
            for k, (got, w) in enumerate(zip(sums(np.arange(rows + more) % pool, rows), want, strict=True)):
                total = total + compare(got, w, f"{more} rows more, weight {k} ")
        caught = all(compare(b, w).differing for b, w in zip(sums(here[::-1].copy(), rows), want, strict=True))
        return GateResult(f"{region.name}/{name}", total.checked, total.differing, caught, total.first)

    return name, gate
