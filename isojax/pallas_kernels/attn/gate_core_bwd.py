"""Gate of attn.core_bwd: a request's gradients depend on its own rows and on nothing else.

Requests are computed alone first, then packed with others in several orders; what lies outside a request is NaN, and
rows that belong to none must come back as zeros. On sm90 the tunings are compared as well.

The control exchanges two query heads of a KV head, which reorders the sums of its keys' gradients and does nothing
else. The two heads nearly cancel in them, so that the order of every addition shows in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Context, GateResult
from isojax.gates.run import device
from isojax.pallas_kernels.attn import core_bwd, kernel_core_bwd_sm90
from isojax.pallas_kernels.attn.gate_core import BF16, SHAPES, Heads  # the last of SHAPES has two chains
from isojax.pallas_kernels.attn.kernel_core_bwd_sm90 import Tuning
from isojax.schedule import LOG2E

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 300, 1100)
QUICK_LENGTHS = (1, 65, 130)
TUNINGS = (Tuning(key_stages=2, keys=128, query_stages=1), Tuning(key_stages=3, keys=64, query_stages=3))


@dataclass(frozen=True)
class Request:
    """Operands of one request of L rows, heads apart: q, out, ct [L, Hq, D], kv [L, Hkv, 2 D], lse [L, Hq]."""

    q: np.ndarray
    kv: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    ct: np.ndarray

    def swapped(self) -> Request:
        """The same with the first two query heads exchanged."""
        order = [1, 0, *range(2, self.q.shape[1])]
        return Request(self.q[:, order], self.kv, self.out[:, order], self.lse[:, order], self.ct[:, order])


def exact(q, kv, ct):
    """Attention of one request in float64 -> out, lse in base 2, dq, dkv; the scale is D ** -0.5."""
    q, kv, ct = (x.astype(np.float64) for x in (q, kv, ct))
    rows, heads, d = q.shape
    group = heads // kv.shape[1]
    out, lse, dq, dkv = np.zeros(q.shape), np.zeros((rows, heads)), np.zeros(q.shape), np.zeros(kv.shape)
    for h in range(heads):
        k, v = kv[:, h // group, :d], kv[:, h // group, d:]
        s = np.where(np.tri(rows, dtype=bool), q[:, h] @ k.T * d**-0.5, -np.inf)
        top = s.max(1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(1, keepdims=True)
        p /= total
        out[:, h], lse[:, h] = p @ v, ((top + np.log(total)) * LOG2E)[:, 0]
        ds = p * (ct[:, h] @ v.T - (ct[:, h] * out[:, h]).sum(1, keepdims=True)) * d**-0.5
        dq[:, h] = ds @ k
        dkv[:, h // group] += np.concatenate([ds.T @ q[:, h], p.T @ ct[:, h]], 1)
    return out, lse, dq, dkv


def draw(rng: np.random.Generator, heads: Heads, length: int, cancelling: bool = True) -> Request:
    """cancelling: the first two query heads nearly cancel in their keys' gradients."""
    normal = lambda *shape: rng.standard_normal(shape).astype(BF16)
    q, ct = (normal(length, heads.q, heads.dim) for _ in range(2))
    kv = normal(length, heads.kv, 2 * heads.dim)
    if cancelling:
        q[:, 1], ct[:, 1] = q[:, 0], -ct[:, 0] * BF16.type(1 + 2.0**-5)
    out, lse, *_ = exact(q, kv, ct)
    return Request(q, kv, out.astype(BF16), lse.astype(np.float32), ct)


def pack(requests: Sequence[Request], slots: int, rows: int) -> tuple[np.ndarray, ...]:
    """Operands of one call: the requests one after another, then NaN; `slots` requests, the last ones empty."""
    counts = [len(r.q) for r in requests]
    cu_q = np.concatenate([[0], np.cumsum(counts + [0] * (slots - len(counts)))]).astype(np.int32)

    def column(name: str, flat: bool) -> np.ndarray:
        parts = [getattr(r, name) for r in requests]
        x = np.full((rows, *parts[0].shape[1:]), np.nan, parts[0].dtype)
        x[: sum(counts)] = np.concatenate(parts)
        return x.reshape(rows, -1) if flat else x

    q, kv, lse = (column(name, False) for name in ("q", "kv", "lse"))
    return q, kv, cu_q, column("out", True), lse, column("ct", True)


Grads = list[tuple[np.ndarray, np.ndarray]]  # dq, dkv of each request


def split(requests: Sequence[Request], outs) -> tuple[Grads, np.ndarray, np.ndarray]:
    """Each request's gradients, and the rows behind the last one of dq and of dkv."""
    ends = np.cumsum([len(r.q) for r in requests])
    dq, dkv = (np.split(x, ends) for x in outs)
    return list(zip(dq[:-1], dkv[:-1], strict=True)), dq[-1], dkv[-1]


def differ(got: Grads, want: Grads, label: str) -> Diff:
    total = Diff(0, 0)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for name, x, y in zip(("dq", "dkv"), a, b, strict=True):
            total = total + compare(x, y, f"{label}, request of {len(x)}, {i}, {name} ")
    return total


def prepared(context: Context):
    """(heads, requests, slots, rows, statics, each request's gradients alone) per shape."""
    for heads in SHAPES[:1] if context.quick else SHAPES:
        requests = [draw(context.rng, heads, n) for n in (QUICK_LENGTHS if context.quick else LENGTHS)]
        slots, rows = len(requests), (sum(len(r.q) for r in requests) // 64 + 2) * 64
        statics = {"scale": heads.dim**-0.5}
        alone: Grads = []
        for r in requests:
            alone += split([r], context.execute(core_bwd, pack([r], slots, rows), statics))[0]
        yield heads, requests, slots, rows, statics, alone


def packed(context: Context) -> GateResult:
    total, caught = Diff(0, 0), True
    for heads, requests, slots, rows, statics, alone in prepared(context):
        orders = [list(range(slots)), list(range(slots))[::-1], list(context.rng.permutation(slots))]
        for order, width in zip(orders, (rows, rows, rows + 128), strict=True):
            chosen = [requests[i] for i in order]
            got, *behind = split(chosen, context.execute(core_bwd, pack(chosen, slots, width), statics))
            total = total + differ(got, [alone[i] for i in order], f"{heads} packed as {order}")
            for x in behind:
                total = total + compare(x, np.zeros_like(x), f"{heads} rows of no request ")
        if context.arch == "sm90":
            total = total + retuned(requests, slots, rows, statics, alone, str(heads))
        moved = [r.swapped() for r in requests]
        got = split(moved, context.execute(core_bwd, pack(moved, slots, rows), statics))[0]
        keys_only = lambda grads: [(dkv, dkv) for _, dkv in grads]
        caught = caught and differ(keys_only(got), keys_only(alone), "control").differing > 0
    return GateResult("attn.core_bwd/alone and packed", total.checked, total.differing, caught, total.first)


def retuned(requests: Sequence[Request], slots: int, rows: int, statics, alone: Grads, label: str) -> Diff:
    """Other key tiles and pipeline depths give the same bits."""
    operands, total = [jax.device_put(x, device("sm90")) for x in pack(requests, slots, rows)], Diff(0, 0)
    for tuned in TUNINGS:
        run = jax.jit(functools.partial(kernel_core_bwd_sm90.gradients, tuned=tuned, **statics))
        got = split(requests, [np.asarray(x) for x in run(*operands)])[0]
        total = total + differ(got, alone, f"{label} {tuned}")
    return total


@core_bwd.gate_cases
def cases(rng, rows_wanted):
    return [("alone and packed", packed)]
