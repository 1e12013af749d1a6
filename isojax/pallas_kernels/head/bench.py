"""Bench of the head at Qwen3-1.7B's shape, against torch's product and log_softmax."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.pallas_kernels.head import logits, logprob, logprob_rows

D, V = 2048, 151936
ROWS = (64, 256, 1024)
TRAINER_ROWS = (64, 1024, 4096)


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


def _product(t):
    return Operand("bf16", (t, D)), Operand("bf16", (V, D), scale=D**-0.5)


@logits.bench_cases
def logits_cases():
    return [
        BenchCase(f"T{t}", _product(t), bytes=2 * (t + V) * D + 4 * t * V, flops=2 * t * V * D, peer=_logits_peer)
        for t in ROWS
    ]


@logprob_rows.bench_cases
def logprob_rows_cases():
    return [
        BenchCase(
            f"T{t}",
            (Operand("f32", (t, V)), Operand("f32", (t,), values=[1.0] * t)),
            bytes=2 * 4 * t * V + 8 * t,
            peer=_rows_peer,
        )
        for t in ROWS
    ]


@logprob.bench_cases
def logprob_cases():
    return [
        BenchCase(
            f"T{t}",
            (*_product(t), Operand("i32", (t,), high=V), Operand("f32", (t,), values=[1.0] * t)),
            bytes=2 * (t + V) * D + 16 * t,
            flops=2 * t * V * D,
            statics={"emit_logits": False},
            peer=_logprob_peer,
        )
        for t in TRAINER_ROWS
    ]
