"""Bench of the norms' gradients against torch's kernel (on a GPU the one behind autograd, given the same rstd)."""

from __future__ import annotations

from isojax.gates.bench import BenchCase, Operand
from isojax.gates.shapes import BATCH_ROWS, distinct
from isojax.pallas_kernels.norms import add_rms_bwd, rms_bwd

TRAINER_ROWS = [t for t in BATCH_ROWS if t >= 1024]


def _backward(torch, x, weight, rstd, ct):
    if x.is_cuda:
        shape, r = list(weight.shape), rstd[:, None]
        return lambda: torch.ops.aten._fused_rms_norm_backward(ct, x, shape, r, weight, [True, True])

    def plain():
        hat, cg = x.float() * rstd[:, None], ct.float() * weight.float()
        return rstd[:, None] * (cg - hat * (cg * hat).mean(-1, keepdim=True)), (ct.float() * hat).sum(0)

    return plain


def _add_backward(torch, h, weight, rstd, ct_h, ct_y):
    norm = _backward(torch, h, weight, rstd, ct_y)

    def both():
        dx, dw = norm()
        return ct_h + dx, dw

    return both


def _cases(cotangents, peer):
    return [
        BenchCase(
            f"{m.name} M{t} D{m.hidden}",
            (
                Operand("bf16", (t, m.hidden)),
                Operand("bf16", (m.hidden,)),
                Operand("f32", (t,), values=[1.0] * t),
                *[Operand("bf16", (t, m.hidden))] * cotangents,
            ),
            bytes=(2 + cotangents) * 2 * t * m.hidden + 6 * m.hidden + 4 * t,
            statics={"zero_centered": False},
            peer=peer,
            model=m.name,
            at={"M": t},
        )
        for m in distinct("hidden")
        for t in TRAINER_ROWS
    ]


@rms_bwd.bench_cases
def rms_cases():
    return _cases(1, _backward)


@add_rms_bwd.bench_cases
def add_rms_cases():
    return _cases(2, _add_backward)
