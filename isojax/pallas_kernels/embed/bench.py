"""Bench of the embedding: an engine's decode batch, and a trainer's batch."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.embed import lookup


def _peer(torch, table, tokens):
    return lambda: torch.nn.functional.embedding(tokens, table)


@lookup.bench_cases
def cases():
    return [
        BenchCase(
            f"T{t} D{d}",
            (Operand("bf16", (151936, d)), Operand("i32", (t,), high=151936)),
            bytes=2 * 2 * t * d + 4 * t,
            peer=_peer,
        )
        for t, d in ((64, 2048), (16384, 2048), (16384, 4096))
    ]
