"""Gates of the head: rows, and that the engine's and the trainer's log-probabilities have the same bits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from isojax.gates.bits import Diff, compare, compare_all
from isojax.gates.case import Case, Context, GateResult, many
from isojax.pallas_kernels.head import logits, logprob, logprob_rows, reference
from isojax.pallas_kernels.linear.reference import dot_t
from isojax.schedule import LEAVES, vocab_leaves

D, V = 256, 1344  # leaves of 168 columns: a whole tile and one of 40
TEMPERATURES = (1.0, 0.7)


def _hidden(rng, rows):
    """Logits of standard deviation 1: a softmax over many tokens, whose sum shows in the log-sum-exp."""
    return tuple(np.asarray(rng.standard_normal((n, D)) * s, jnp.bfloat16) for n, s in ((rows, 1), (V, D**-0.5)))


def _inverse(rows):
    return np.resize(np.float32(1) / np.asarray(TEMPERATURES, np.float32), rows)


def _targets(rng, rows):
    return rng.integers(0, V, rows).astype(np.int32)


def exact_logits(hidden, weight):
    return hidden.astype(np.float64) @ weight.astype(np.float64).T


def exact_rows(logits, inv_temperature):
    z = logits.astype(np.float64) * inv_temperature.astype(np.float64)[:, None]
    top = z.max(1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(1))
    return z - lse[:, None], lse


def exact_logprob(hidden, weight, targets, inv_temperature, *, emit_logits=False):
    raw = exact_logits(hidden, weight)
    rows, lse = exact_rows(raw, inv_temperature)
    out = np.take_along_axis(rows, targets[:, None], 1)[:, 0], lse
    return (*out, raw) if emit_logits else out


def _logits_reassociated(hidden, weight):
    """Above the boundary the chain is cut in two."""
    halves = dot_t(hidden[:, : D // 2], weight[:, : D // 2]) + dot_t(hidden[:, D // 2 :], weight[:, D // 2 :])
    return halves if many(hidden) else dot_t(hidden, weight)


def _rows_reassociated(logits, inv_temperature):
    """Above the boundary vocabulary leaves 1 and 2 change places in the tree."""
    z = logits * inv_temperature[:, None]
    lse = reference.log_sum_exp(z[:, swapped()] if many(z) else z)
    return z - lse[:, None], lse


def _logprob_rounded(hidden, weight, targets, inv_temperature, *, emit_logits):
    """Above the boundary logits are rounded to bf16 before the softmax."""
    raw = dot_t(hidden, weight)
    z = (raw.astype(jnp.bfloat16).astype(jnp.float32) if many(hidden) else raw) * inv_temperature[:, None]
    lse = reference.log_sum_exp(z)
    return jnp.take_along_axis(z, targets[:, None], 1)[:, 0] - lse, lse


def swapped(vocab: int = V) -> np.ndarray:
    """The order of the vocabulary in which leaves 1 and 2 change places: the same terms, one reassociated tree."""
    leaves = [np.arange(start, stop) for start, stop in vocab_leaves(vocab, LEAVES)]
    leaves[1], leaves[2] = leaves[2], leaves[1]
    return np.concatenate(leaves)


@logits.gate_cases
def logits_cases(rng, rows):
    return Case("chain", _hidden(rng, rows), {}, _logits_reassociated, exact_logits)


def _spread(rng, rows: int, vocab: int) -> np.ndarray:
    """fp32 logits whose largest is 0: the sum's last bit shows in the log-sum-exp."""
    z = 8 * rng.standard_normal((rows, vocab))
    return (z - z.max(1, keepdims=True)).astype(np.float32)


@logprob_rows.gate_cases
def logprob_rows_cases(rng, rows):
    return [
        Case("softmax", (_spread(rng, rows, V), _inverse(rows)), {}, _rows_reassociated, exact_rows),
        ("wide, any number of rows", wide_rows),
    ]


def wide_rows(context: Context) -> GateResult:
    """A vocabulary of which a block may hold less than its part of a row, or several rows: the number of rows decides
    who computes them, and no bit. The control exchanges two leaves of the vocabulary."""
    vocab, most = 128256, 80
    z, inv = _spread(context.rng, most, vocab), _inverse(most)
    run = lambda x, rows: context.execute(logprob_rows, (x[:rows], inv[:rows]), {})
    want = run(z, most)
    total = Diff(0, 0)
    for rows in (16, 64):
        total = total + compare_all(run(z, rows), [w[:rows] for w in want], f"{rows} rows ")
    caught = compare(run(z[:, swapped(vocab)], most)[1], want[1]).differing > 0
    return GateResult("head.logprob_rows/wide, any number of rows", total.checked, total.differing, caught, total.first)


@logprob.gate_cases
def logprob_cases(rng, rows):
    args = *_hidden(rng, rows), _targets(rng, rows), _inverse(rows)
    return [
        Case("fused", args, {"emit_logits": False}, _logprob_rounded, exact_logprob),
        ("equals logits then logprob_rows", fused_equals_parts),
        ("emit_logits changes no bits", emitting_changes_nothing),
    ]


def fused_equals_parts(context: Context) -> GateResult:
    """The discharge between engine and trainer: head.logits, head.logprob_rows and a pick give the bits of
    head.logprob, in the logits of the whole vocabulary, the log-sum-exp and the sampled token."""
    rows = 192
    hidden, weight = _hidden(context.rng, rows)
    targets = _targets(context.rng, rows)
    targets[:2] = 0, V - 1
    checked = differing = 0
    detail, caught = "", True
    for temperature in TEMPERATURES:
        inv = np.full(rows, np.float32(1) / np.float32(temperature), np.float32)
        fused = context.execute(logprob, (hidden, weight, targets, inv), {"emit_logits": True})
        (raw,) = context.execute(logits, (hidden, weight), {})

        def parts(raw, inv=inv):
            log_probabilities, lse = context.execute(logprob_rows, (raw, inv), {})
            return np.take_along_axis(log_probabilities, targets[:, None], 1)[:, 0], lse

        diff = compare_all(fused, (*parts(raw), raw), f"temperature {temperature} ")
        checked, differing, detail = checked + diff.checked, differing + diff.differing, detail or diff.first
        # controls: one reassociated tree of leaves, and logits rounded to bf16 on one side
        _, reassociated = context.execute(logprob_rows, (raw[:, swapped()], inv), {})
        rounded = parts(np.asarray(raw.astype(jnp.bfloat16), np.float32))
        caught &= compare(reassociated, fused[1]).differing > 0 and compare_all(rounded, fused[:2]).differing > 0
    return GateResult("head.logprob/equals logits then logprob_rows", checked, differing, caught, detail)


def emitting_changes_nothing(context: Context) -> GateResult:
    """Asking for the raw logits leaves the log-probabilities alone, whatever tiles that makes the kernel choose."""
    hidden, weight = _hidden(context.rng, 256)
    args = hidden, weight, _targets(context.rng, 256), _inverse(256)
    plain = context.execute(logprob, args, {"emit_logits": False})
    diff = compare_all(context.execute(logprob, args, {"emit_logits": True})[:2], plain)
    # control: temperatures taken from the row before
    moved = context.execute(logprob, (*args[:3], np.roll(args[3], 1)), {"emit_logits": True})[:2]
    return GateResult(
        "head.logprob/emit_logits changes no bits",
        diff.checked,
        diff.differing,
        compare_all(moved, plain).differing > 0,
        diff.first,
    )
