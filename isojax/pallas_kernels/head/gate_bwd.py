"""Gate of the head's backward: rows of dhidden, and that no tile and no padding changes a bit of either gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from isojax.gates import rowgate
from isojax.gates.bits import Diff, compare, compare_all
from isojax.gates.case import Case, Context, GateBroken, GateResult
from isojax.gates.run import device
from isojax.pallas_kernels.head import gate, kernel_bwd_sm90, logprob_bwd
from isojax.pallas_kernels.linear.tiles import Tiles

D, V = 64, 640
STATICS = {"vocab_chunk": 256}  # three chunks, of which the last one reaches past the end
VARIANTS = (
    Tiles(64, 128, 32, (2, 1)),
    Tiles(128, 128, 64, (2, 1)),
    Tiles(64, 256, 64, (2, 1), snake=16),
    Tiles(64, 128, 64, (2, 1), cluster=2, shared="w"),
)


def operands(rng, rows):
    """Rows with logits of standard deviation 1; and, every other one, rows of equal logits: the weight's rows cancel in
    pairs, so that of their dhidden only roundings are left and the order of every addition shows in bf16."""
    hidden, weight = (np.asarray(rng.standard_normal((n, D)) * s, jnp.bfloat16) for n, s in ((rows, 1), (V, D**-0.5)))
    mates = V // 2 + rng.permutation(V // 2)
    weight[0] = 0
    weight[mates] = -weight[: V // 2]
    inv = gate._inverse(rows)
    hidden[::2] = 0
    _, lse = gate.exact_rows(gate.exact_logits(hidden, weight), inv)
    targets, ct = rng.integers(0, V, rows).astype(np.int32), rng.standard_normal(rows).astype(np.float32)
    targets[::2] = 0
    return hidden, weight, targets, inv, lse.astype(np.float32), ct


def exact(hidden, weight, targets, inv_temperature, lse, ct, *, vocab_chunk=0):
    h, w, inv, lse, ct = (a.astype(np.float64) for a in (hidden, weight, inv_temperature, lse, ct))
    dz = -np.exp(h @ w.T * inv[:, None] - lse[:, None])
    dz[np.arange(len(h)), targets] += 1
    dz *= (ct * inv)[:, None]
    return dz @ w, dz.T @ h


@logprob_bwd.gate_cases
def cases(rng, rows):
    return [("rows of dhidden", rows_alone), ("any tile, any padding", any_tile)]


def rows_alone(context: Context) -> GateResult:
    """A row of dhidden is a function of its own operands: alone, in any batch, at any position, beside garbage."""
    batches = rowgate.QUICK_BATCHES if context.quick else rowgate.BATCHES
    tile = rowgate.TILE[context.arch]
    case = Case("", operands(context.rng, max(batches)))
    dhidden = lambda args: context.execute(logprob_bwd, args, STATICS)[:1]
    for control, fn in rowgate.controls(logprob_bwd, case, dhidden, tile).items():
        if not rowgate.check(logprob_bwd, case, fn, tile, batches, first_only=True).differing:
            raise GateBroken(f"head.logprob_bwd: the gate did not catch its negative control '{control}'")
    diff = rowgate.check(logprob_bwd, case, dhidden, tile, batches)
    return GateResult("head.logprob_bwd/rows of dhidden", diff.checked, diff.differing, True, diff.first)


def any_tile(context: Context) -> GateResult:
    """Rows without a cotangent at the end (padding) change nothing; on a GPU, nor do tiles and the order of work."""
    args = operands(context.rng, 192)
    run = lambda args, statics=STATICS: context.execute(logprob_bwd, args, statics)
    whole = run(args)
    hidden, weight, *rows = args
    longer = np.concatenate([hidden, hidden[:64]]), weight, *(np.concatenate([r, r[:64]]) for r in rows[:-1])
    dhidden, dweight = run((*longer, np.concatenate([rows[-1], np.zeros(64, np.float32)])))
    total = compare_all((dhidden[:192], dweight), whole, "padded ")
    if context.arch == "sm90":
        total = total + _retiled(args, whole)
    # controls: the rows in another order, which reassociates dweight; chunks half as wide, which reassociate dhidden
    order = context.rng.permutation(192)
    _, other = run((hidden[order], weight, *(r[order] for r in rows)))
    narrow = run(args, {"vocab_chunk": STATICS["vocab_chunk"] // 2})[0]
    caught = compare(other, whole[1]).differing > 0 and compare(narrow, whole[0]).differing > 0
    return GateResult("head.logprob_bwd/any tile, any padding", total.checked, total.differing, caught, total.first)


def _retiled(args, whole) -> Diff:
    here, total = [jax.device_put(a, device("sm90")) for a in args], Diff(0, 0)
    for t in VARIANTS:
        cut = dict.fromkeys(("dlogits", "dhidden", "dweight"), t)
        run = jax.jit(functools.partial(kernel_bwd_sm90.logprob_bwd, cut=cut, **STATICS))
        total = total + compare_all(run(*here), whole, f"{t} ")
    return total
