"""Gates of the linear gradients: rows of dgrad, and that no cut of an output or of the work changes a bit."""

from __future__ import annotations

import functools

import jax
import numpy as np

from isojax.gates.bits import Diff, compare
from isojax.gates.case import Case, Context, GateResult, ill_conditioned, many
from isojax.gates.run import device
from isojax.pallas_kernels.head import logits
from isojax.pallas_kernels.linear import column, dgrad, kernel_grad_sm90, reference, wgrad
from isojax.pallas_kernels.linear.tiles import Tiles

N, K = 192, 160  # neither is a multiple of a block tile
T = 256

# What is free to tune: tile shapes, pipeline step, warpgroups, clusters, order of work.
VARIANTS = (
    Tiles(64, 64, 32, (1, 1)),
    Tiles(64, 128, 64, (2, 1)),
    Tiles(64, 256, 64, (2, 1)),
    Tiles(128, 128, 64, (2, 1), snake=1),
    Tiles(128, 64, 16, (1, 2)),
    Tiles(64, 64, 64, (2, 1), cluster=2, shared="x"),
    Tiles(64, 64, 64, (2, 1), cluster=2, shared="w"),
    Tiles(128, 64, 64, (1, 1), cluster=2, shared="w", snake=16),
)


def exact_dgrad(ct, weight):
    return ct.astype(np.float64) @ weight.astype(np.float64)


def exact_wgrad(ct, x):
    return ct.astype(np.float64).T @ x.astype(np.float64)


def _dgrad_operands(rng, rows):
    """In the second half of the outputs the terms cancel in pairs far apart: only roundings are left, so that the order
    of every addition shows even after the rounding to bf16."""
    ct, weight = ill_conditioned(rng, rows, N), ill_conditioned(rng, N, K)
    mates = N // 2 + rng.permutation(N // 2)
    ct[:, mates] = ct[:, : N // 2]
    weight[mates, K // 2 :] = -weight[: N // 2, K // 2 :]
    return ct, weight


def _dgrad_reassociated(ct, weight):
    """Above the boundary N is two chains."""
    whole = reference.dot_t(ct, weight.T)
    half = N // 2
    halves = reference.dot_t(ct[:, :half], weight[:half].T) + reference.dot_t(ct[:, half:], weight[half:].T)
    return (halves if many(ct) else whole).astype(ct.dtype)


@dgrad.gate_cases
def dgrad_cases(rng, rows):
    return [
        Case("chain", _dgrad_operands(rng, rows), {}, _dgrad_reassociated, exact_dgrad),
        ("any cut", dgrad_any_cut),
    ]


@wgrad.gate_cases
def wgrad_cases(rng, rows):
    return [("any cut", wgrad_any_cut)]


def _retiled(context: Context, kernel, args, whole) -> Diff:
    """On a GPU: the same bits from every tile."""
    total = Diff(0, 0)
    if context.arch == "sm90":
        here = [jax.device_put(a, device("sm90")) for a in args]
        for t in VARIANTS:
            total = total + compare(jax.jit(functools.partial(kernel, t=t))(*here), whole, f"{t} ")
    return total


def dgrad_any_cut(context: Context) -> GateResult:
    """Columns of the weight, rows of ct, tiles; and on a GPU, that a weight stored contraction first gives the
    bits of linear.column on its transpose."""
    ct, weight = _dgrad_operands(context.rng, T)
    run = lambda a, w: context.execute(dgrad, (a, w), {})[0]
    whole = run(ct, weight)
    total = _retiled(context, kernel_grad_sm90.dgrad, (ct, weight), whole)
    for start, stop in ((0, 16), (16, 48), (80, 160), (128, 160)):
        part = run(ct, np.ascontiguousarray(weight[:, start:stop]))
        total = total + compare(part, whole[:, start:stop], f"weight[:, {start}:{stop}] ")
    for start, stop in ((0, 64), (128, 192), (64, 256)):
        total = total + compare(run(ct[start:stop], weight), whole[start:stop], f"ct[{start}:{stop}] ")
    if context.arch == "sm90":
        transposed = np.ascontiguousarray(weight.T)
        total = total + compare(context.execute(column, (ct, transposed), {})[0], whole, "linear.column ")
    # control: the contraction in descending order
    backward = run(np.ascontiguousarray(ct[:, ::-1]), np.ascontiguousarray(weight[::-1]))
    caught = compare(backward, whole).differing > 0
    return GateResult("linear.dgrad/any cut", total.checked, total.differing, caught, total.first)


def wgrad_any_cut(context: Context) -> GateResult:
    """Columns of either operand, rows of zeros at the end (padding tokens), tiles; and on a GPU, that operands stored
    contraction first give the bits of head.logits, the same chain in fp32, on their transposes."""
    ct, x = ill_conditioned(context.rng, T, N), ill_conditioned(context.rng, T, K)
    run = lambda a, b: context.execute(wgrad, (np.ascontiguousarray(a), np.ascontiguousarray(b)), {})[0]
    whole = run(ct, x)
    total = _retiled(context, kernel_grad_sm90.wgrad, (ct, x), whole)
    narrow = ((0, 16), (16, 48)) if context.arch == "sm90" else ()  # XLA's CPU dots change below 64 columns
    for start, stop in (*narrow, (0, 64), (64, 160)):
        total = total + compare(run(ct[:, start:stop], x), whole[start:stop], f"ct[:, {start}:{stop}] ")
        total = total + compare(run(ct, x[:, start:stop]), whole[:, start:stop], f"x[:, {start}:{stop}] ")
    padded = [np.concatenate([a, np.zeros((64, a.shape[1]), a.dtype)]) for a in (ct, x)]
    total = total + compare(run(*padded), whole, "padded ")
    if context.arch == "sm90":
        transposed = [np.ascontiguousarray(a.T) for a in (ct, x)]
        total = total + compare(context.execute(logits, transposed, {})[0], whole, "head.logits ")
    # control: tokens in two chains
    halves = run(ct[: T // 2], x[: T // 2]) + run(ct[T // 2 :], x[T // 2 :])
    caught = compare(halves, whole).differing > 0
    return GateResult("linear.wgrad/any cut", total.checked, total.differing, caught, total.first)
