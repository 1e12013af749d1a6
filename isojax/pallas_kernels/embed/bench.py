"""Bench of the embedding: an engine's decode batch, and a trainer's batch."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.embed import lookup


def _peer(torch, table, tokens):
    return lambda: torch.nn.functional.embedding(tokens, table)


@lookup.bench_cases
def cases():
    return [
        BenchCase(
            f"{m.name} M{t} D{m.hidden}",
            (Operand("bf16", (m.vocab, m.hidden)), Operand("i32", (t,), high=m.vocab)),
            bytes=2 * 2 * t * m.hidden + 4 * t,
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden")
        for t in BATCH_ROWS
    ]
