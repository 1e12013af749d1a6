"""Bench of the embedding's gradient against torch's, which sums in fp32 too where it is given fp32."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.embed import lookup_bwd


def _peer(torch, tokens, ct):
    index, rows = tokens.long(), ct.float()
    vocab = _vocab(ct.shape[1])
    return lambda: torch.ops.aten.embedding_dense_backward(rows, index, vocab, -1, False)


def _vocab(hidden: int) -> int:
    return next(m.vocab for m in distinct("hidden") if m.hidden == hidden)


@lookup_bwd.bench_cases
def cases():
    return [
        BenchCase(
            f"{m.name} M{t} D{m.hidden}",
            (Operand("i32", (t,), high=m.vocab), Operand("bf16", (t, m.hidden))),
            bytes=4 * m.vocab * m.hidden + 2 * t * m.hidden + 4 * t,
            statics={"vocab": m.vocab},
            peer=_peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden")
        for t in BATCH_ROWS
        if t >= 1024
    ]
