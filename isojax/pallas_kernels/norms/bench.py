"""Bench of the norms against torch's."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.norms import add_rms, rms


def _rms_peer(eps):
    def peer(torch, x, weight):
        return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    return peer


def _add_rms_peer(eps):
    def peer(torch, x, delta, weight):
        def both():
            h = x + delta
            return h, torch.nn.functional.rms_norm(h, weight.shape, weight, eps)

        return both

    return peer


def _cases(inputs, peer):
    return [
        BenchCase(
            f"{m.name} M{t} D{m.hidden}",
            (Operand("bf16", (t, m.hidden)),) * inputs + (Operand("bf16", (m.hidden,)),),
            bytes=2 * inputs * 2 * t * m.hidden + 2 * m.hidden + 4 * t,
            statics={"eps": m.eps},
            peer=peer(m.eps),
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden")
        for t in BATCH_ROWS
    ]


@rms.bench_cases
def rms_cases():
    return _cases(1, _rms_peer)


@add_rms.bench_cases
def add_rms_cases():
    return _cases(2, _add_rms_peer)
