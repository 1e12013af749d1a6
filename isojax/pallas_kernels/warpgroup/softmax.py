"""Softmax on a warpgroup's rows, one named rounding an instruction.

`lines` takes the scalar steps of `meet` and `finish` from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32, i32

LOWEST = -1e30  # a maximum of nothing: finite, so that a row without a key stays free of NaN


def zeros(n: int) -> jax.Array:
    """[64, n]."""
    if interpreting():
        return jnp.zeros((64, n), f32)
    return plgpu.layout_cast(jnp.zeros((64, n), f32), reg.ACC)


def full_row(value: float) -> jax.Array:
    """[64]."""
    return plgpu.layout_cast(jnp.full((64,), value, f32), reg.ROW)


def visible(scores: jax.Array, last: jax.Array, tile: int) -> jax.Array:
    """scores [64, n], with -inf where a column is past last + r % tile, r being the row. last: int32; tile: 2^k."""
    n = scores.shape[1]
    if interpreting():
        limit = last + jnp.arange(64, dtype=i32) % tile
        return jnp.where(jnp.arange(n, dtype=i32) <= limit[:, None], scores, -jnp.inf)

    @reg.inline(arg_types=(reg.ACC, reg.SCALAR), return_type=reg.acc(n))
    def run(_, s, last_):
        x, first = reg.scalars(s), arith.subi(last_.registers.item(), reg.column())
        room = [arith.addi(first, arith.andi(reg.row(half), reg.integer(tile - 1))) for half in range(2)]
        hidden = reg.constant(-np.inf)
        for i, half, e in np.ndindex(*x.shape):
            seen = arith.cmpi(arith.CmpIPredicate.sge, room[half], reg.integer(8 * i + e))
            x[i, half, e] = arith.select(seen, x[i, half, e], hidden)
        return reg.value(x)

    return run(scores, last)


def weigh_first(scores: jax.Array, m: jax.Array, factor: float, anew: jax.Array) -> tuple[jax.Array, ...]:
    """One step of the online softmax in base 2, first half: scores [64, n], m [64] -> x [64, n], m, alpha [64].

    m: running maximum of the scores times `factor`, rounded. x: p = 2^(scores factor - m), the exponent rounded once,
    in the rows of half 0 (see `registers`); the scores in the others.
    anew: whether this is the first step: m is then taken as LOWEST, so that alpha, the factor of what was summed
    before, is 0.
    """
    n = scores.shape[1]
    if interpreting():
        m = jnp.where(anew, LOWEST, m)
        top = jnp.maximum(m, scores.max(1) * f32(factor))
        return scores, top, jnp.exp2(m - top)

    @reg.inline(arg_types=(reg.ACC, reg.ROW, reg.SCALAR), return_type=(reg.acc(n), reg.ROW_OUT, reg.ROW_OUT))
    def run(_, s, m_row, first):
        x = reg.scalars(s)
        c, lowest = reg.constant(factor), reg.constant(LOWEST)
        before = reg.each(lambda m: arith.select(first.registers.item(), lowest, m), reg.scalars(m_row))
        tops, alphas = np.empty(2, object), np.empty(2, object)
        for half in range(2):
            tops[half] = _largest(x, half)
        for half in range(2):
            tops[half] = arith.maxnumf(before[half], arith.mulf(tops[half], c))
            alphas[half] = reg.exp2(arith.subf(before[half], tops[half]))
        _exponentials(x, 0, c, tops[0])
        return reg.value(x), reg.value(tops), reg.value(alphas)

    return run(scores, m, jnp.asarray(anew))


def weigh_second(x: jax.Array, m: jax.Array, den: jax.Array, alpha: jax.Array, factor: float) -> tuple[jax.Array, ...]:
    """Second half: what `weigh_first` gave, and den [64] -> p [64, n], den.

    den: running sum of p; on a GPU each of the four threads of a row holds that of its own columns (see row_sum).
    """
    n = x.shape[1]
    if interpreting():
        p = jnp.exp2(x * f32(factor) - m[:, None])
        return p, den * alpha + p.sum(1)

    @reg.inline(arg_types=(reg.ACC, *[reg.ROW] * 3), return_type=(reg.acc(n), reg.ROW_OUT))
    def run(_, s, *rows):
        x, (tops, sums, alphas) = reg.scalars(s), map(reg.scalars, rows)
        _exponentials(x, 1, reg.constant(factor), tops[1])
        sums = np.array([_added(x, half, sums[half], alphas[half]) for half in range(2)], object)
        return reg.value(x), reg.value(sums)

    return run(x, m, den, alpha)


def weigh_few(scores: jax.Array, m: jax.Array, den: jax.Array, factor: float, anew: jax.Array) -> tuple[jax.Array, ...]:
    """Both halves -> p, m, den, alpha, where only the first 8 rows matter: on a GPU p is 0 in half 1."""
    if interpreting():
        x, top, alpha = weigh_first(scores, m, factor, anew)
        p, den = weigh_second(x, top, den, alpha, factor)
        return p, top, den, alpha
    n = scores.shape[1]

    @reg.inline(arg_types=(reg.ACC, reg.ROW, reg.ROW, reg.SCALAR), return_type=(reg.acc(n), *[reg.ROW_OUT] * 3))
    def run(_, s, m_row, den_part, first):
        x, tops, sums = map(reg.scalars, (s, m_row, den_part))
        c = reg.constant(factor)
        before = arith.select(first.registers.item(), reg.constant(LOWEST), tops[0])
        tops[0] = arith.maxnumf(before, arith.mulf(_largest(x, 0), c))
        alpha = reg.exp2(arith.subf(before, tops[0]))
        _exponentials(x, 0, c, tops[0])
        sums[0] = _added(x, 0, sums[0], alpha)
        x[:, 1] = reg.constant(0.0)  # scores kept for long would keep ptxas from running products side by side
        return *map(reg.value, (x, tops, sums)), reg.value(np.array([alpha, reg.constant(1.0)], object))

    return run(scores, m, den, jnp.asarray(anew))


def _largest(x: np.ndarray, half: int) -> Any:
    """Of a row."""
    chains = list(x[:2, half].flat)  # four, as each step waits for the one before it
    for i in range(2, x.shape[0], 2):
        chains = [arith.maxnumf(a, b) for a, b in zip(chains, x[i : i + 2, half].flat, strict=True)]
    a, b, c, d = chains
    return reg.over_quad(arith.maxnumf, arith.maxnumf(arith.maxnumf(a, b), arith.maxnumf(c, d)))


def _added(x: np.ndarray, half: int, den: Any, alpha: Any) -> Any:
    """den at the new maximum, with this thread's weights of a row."""
    total = x[0, half].copy()
    for i, e in np.ndindex(x.shape[0], 2):
        total[e] = x[i, half, e] if i == 0 else arith.addf(total[e], x[i, half, e])
    return math.fma(den, alpha, arith.addf(total[0], total[1]))


def _exponentials(x: np.ndarray, half: int, factor: Any, top: Any) -> None:
    """In place, on the rows of one half."""
    low = arith.negf(top)
    for i, e in np.ndindex(x.shape[0], 2):
        x[i, half, e] = reg.exp2(math.fma(x[i, half, e], factor, low))


def row_sum(den: jax.Array) -> jax.Array:
    """The sums of a row's four threads added by one tree: `weigh_second`'s den as any other value. [64] -> [64]."""
    if interpreting():
        return den

    @reg.inline(arg_types=(reg.ROW,), return_type=reg.ROW_OUT)
    def run(_, part):
        return reg.value(reg.each(lambda x: reg.over_quad(arith.addf, x), reg.scalars(part)))

    return run(den)


def rescale(acc: Sequence[jax.Array], alpha: jax.Array) -> tuple[jax.Array, ...]:
    """Panels [64, n] times alpha [64]."""
    if interpreting():
        return tuple(a * alpha[:, None] for a in acc)
    returns = tuple(reg.acc(a.shape[1]) for a in acc)

    @reg.inline(arg_types=(*[reg.ACC] * len(acc), reg.ROW), return_type=returns)
    def run(_, *args):
        *panels, row = args
        by, out = reg.scalars(row), []
        for panel in panels:
            x = reg.scalars(panel)
            for i, half, e in np.ndindex(*x.shape):
                x[i, half, e] = arith.mulf(x[i, half, e], by[half])
            out.append(reg.value(x))
        return tuple(out)

    return run(*acc, alpha)


def meet(big_m: jax.Array, big_den: jax.Array, m: jax.Array, den: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of two sets of keys together -> maximum, denominator, and the factors of the first sum and of the second."""
    if interpreting():
        top = jnp.maximum(big_m, m)
        old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
        return top, big_den * old + den * new, old, new

    @reg.inline(arg_types=(reg.ROW,) * 4, return_type=(reg.ROW_OUT,) * 4)
    def run(_, *rows):
        met = [meet_scalars(*x) for x in zip(*map(reg.scalars, rows), strict=True)]
        return tuple(reg.value(np.array([half[k] for half in met], object)) for k in range(4))

    return run(big_m, big_den, m, den)


def meet_scalars(big_m: Any, big_den: Any, m: Any, den: Any) -> tuple[Any, Any, Any, Any]:
    """Scalars: maximum and denominator of two sets of keys together, and the factors of the sums of both."""
    top = arith.maxnumf(big_m, m)
    old, new = reg.exp2(arith.subf(big_m, top)), reg.exp2(arith.subf(m, top))
    return top, math.fma(big_den, old, arith.mulf(den, new)), old, new


def finish(acc: Sequence[jax.Array], m: jax.Array, den: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """-> panels of the output in bf16 [64, 64], log-sum-exp in base 2 [64]; of a row without a key, 0 and m."""
    if interpreting():
        some = jnp.where(den > 0.0, den, 1.0)
        inverse = jnp.where(den > 0.0, 1.0 / some, 0.0)
        return tuple((a * inverse[:, None]).astype(jnp.bfloat16) for a in acc), m + jnp.log2(some)
    panel: Any = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @reg.inline(arg_types=((reg.ACC,) * len(acc), reg.ROW, reg.ROW), return_type=((panel,) * len(acc), reg.ROW_OUT))
    def run(_, accs, m_row, den_row):
        ends = [finish_scalars(*x) for x in zip(reg.scalars(m_row), reg.scalars(den_row), strict=True)]
        out = []
        for a in accs:
            x = reg.scalars(a)
            for i, half, e in np.ndindex(*x.shape):
                x[i, half, e] = arith.mulf(x[i, half, e], ends[half][0])
            out.append(reg.value(x).to_layout(mgpu.WGMMA_LAYOUT).astype(ir.BF16Type.get()))
        return (*out, reg.value(np.array([lse for _, lse in ends], object)))

    return run(tuple(acc), m, den)


def finish_scalars(m: Any, den: Any) -> tuple[Any, Any]:
    """Scalars: 1 / den (0 where den is 0), and the log-sum-exp."""
    some = arith.cmpf(arith.CmpFPredicate.OGT, den, reg.constant(0.0))
    safe = arith.select(some, den, reg.constant(1.0))
    return arith.select(some, reg.reciprocal(safe), reg.constant(0.0)), arith.addf(m, reg.log2(safe))
