"""Bench of the head, whole on every rank, against torch's product and log_softmax."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import MODELS, distinct
from isojax.pallas_kernels.head import logits, logprob, logprob_rows

ROWS = (64, 256, 1024)  # an engine's: sampled tokens of a step
TRAINER_ROWS = (64, 1024, 8192)


def _logits_peer(torch, hidden, weight):
    return lambda: torch.mm(hidden, weight.t()).float()


def _rows_peer(torch, raw, inverse):
    return lambda: torch.log_softmax(raw * inverse[:, None], -1)


def _logprob_peer(torch, hidden, weight, targets, inverse):
    index = targets.long()[:, None]

    def run():
        raw = torch.mm(hidden, weight.t()).float()
        return torch.log_softmax(raw * inverse[:, None], -1).gather(1, index)[:, 0]

    return run


def _product(t, m):
    return Operand("bf16", (t, m.hidden)), Operand("bf16", (m.vocab, m.hidden), scale=m.hidden**-0.5)


@logits.bench_cases
def logits_cases():
    return [
        BenchCase(
            f"{m.name} M{t} V{m.vocab} D{m.hidden}",
            _product(t, m),
            bytes=2 * (t + m.vocab) * m.hidden + 4 * t * m.vocab,
            flops=2 * t * m.vocab * m.hidden,
            peer=_logits_peer,
            model=m.name,
            at={"M": t},
        )
        for m in MODELS
        for t in ROWS
    ]


@logprob_rows.bench_cases
def logprob_rows_cases():
    return [
        BenchCase(
            f"M{t} V{vocab}",
            (Operand("f32", (t, vocab)), Operand("f32", (t,), values=[1.0] * t)),
            bytes=2 * 4 * t * vocab + 8 * t,
            peer=_rows_peer,
            part=f"V {vocab}",
            at={"M": t},
        )
        for vocab in sorted({m.vocab for m in MODELS})
        for t in ROWS
    ]


@logprob.bench_cases
def logprob_cases():
    return [
        BenchCase(
            f"{m.name} M{t} V{m.vocab} D{m.hidden}",
            (*_product(t, m), Operand("i32", (t,), high=m.vocab), Operand("f32", (t,), values=[1.0] * t)),
            bytes=2 * (t + m.vocab) * m.hidden + 16 * t,
            flops=2 * t * m.vocab * m.hidden,
            statics={"emit_logits": False},
            peer=_logprob_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden", "vocab")
        for t in TRAINER_ROWS
    ]
