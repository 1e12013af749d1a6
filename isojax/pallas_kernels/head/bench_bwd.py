"""Bench of the head's backward against torch's own backward of product, log_softmax and gather."""

from __future__ import annotations

import math

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import distinct
from isojax.pallas_kernels.head import logprob_bwd

ROWS = (1024, 8192)


def _peer(torch, hidden, weight, targets, inv_temperature, lse, ct):
    del lse  # torch keeps the log-probabilities of its forward instead
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    raw = torch.nn.functional.linear(hidden, weight).float() * inv_temperature[:, None]
    out = torch.log_softmax(raw, -1).gather(1, targets.long()[:, None])[:, 0]
    return lambda: torch.autograd.grad(out, (hidden, weight), ct, retain_graph=True)


@logprob_bwd.bench_cases
def cases():
    """Logits are near normal with variance 1, whose log-sum-exp is log V + 1/2."""
    return [
        BenchCase(
            f"{m.name} M{t} V{m.vocab} D{m.hidden}",
            (
                Operand("bf16", (t, m.hidden)),
                Operand("bf16", (m.vocab, m.hidden), scale=m.hidden**-0.5),
                Operand("i32", (t,), high=m.vocab),
                Operand("f32", (t,), values=[1.0] * t),
                Operand("f32", (t,), values=[math.log(m.vocab) + 0.5] * t),
                Operand("f32", (t,)),
            ),
            bytes=4 * (t + m.vocab) * m.hidden + 4 * m.vocab * m.hidden + 16 * t,
            flops=6 * t * m.vocab * m.hidden,
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden", "vocab")
        for t in ROWS
    ]
