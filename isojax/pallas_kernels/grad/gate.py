"""Gate of gradient accumulation: an element's sum does not depend on which array it lies in, nor where."""

from __future__ import annotations

import jax.numpy as jnp

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Context, GateResult, ill_conditioned
from isojax.pallas_kernels.grad import accumulate

PARTS = 4


@accumulate.gate_cases
def cases(rng, rows):
    return [(f"elements, {jnp.dtype(d).name}", elements(d)) for d in (jnp.bfloat16, jnp.float32)]


def elements(dtype):
    def gate(context: Context) -> GateResult:
        size = 6000 if context.quick else 1_000_003
        parts = [ill_conditioned(context.rng, size, dtype=dtype) for _ in range(PARTS)]
        run = lambda *p: context.execute(accumulate, p, {})[0]
        whole, total = run(*parts), Diff(0, 0)
        cuts = [(0, 128), (1, 130), (size - 2049, size), (size // 3, size // 3 + 2048), (7, 4200)]
        for start, stop in cuts:
            total = total + compare(run(*[p[start:stop] for p in parts]), whole[start:stop], f"[{start}:{stop}] ")
        square = run(*[p[: 50 * 64].reshape(50, 64) for p in parts])
        total = total + compare(square.ravel(), whole[: 50 * 64], "[50, 64] ")
        # control: a balanced tree of the same operands, with a rounding at each node
        pairs = [run(*parts[i : i + 2]) for i in range(0, PARTS, 2)]
        caught = compare(run(*pairs), whole).differing > 0
        return GateResult(
            f"grad.accumulate/elements, {jnp.dtype(dtype).name}", total.checked, total.differing, caught, total.first
        )

    return gate
