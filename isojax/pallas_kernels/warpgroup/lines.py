"""`fold` and `finish` on vectors of 128 elements, one a thread: whole heads side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32
from isojax.pallas_kernels.warpgroup.softmax import finish_scalars, meet_scalars

LINE: Any = plgpu.Layout.WG_STRIDED((128,), vec_size=1)
_OUT: Any = plgpu.ShapeDtypeStruct((128,), f32, layout=LINE)


def line(value: float) -> jax.Array:
    """[128]."""
    return plgpu.layout_cast(jnp.full((128,), value, f32), LINE)


def fold_line(total: jax.Array, big_m, big_den, part: jax.Array, ends: Sequence[tuple[jax.Array, jax.Array]]):
    """`fold` of lines: 128 / D heads side by side, each with its own (m, den) in `ends` -> total, big_m, big_den."""
    width = 128 // len(ends)
    if interpreting():
        m, den = (jnp.repeat(jnp.stack([e[k] for e in ends]), width) for k in range(2))
        top = jnp.maximum(big_m, m)
        old, new = jnp.exp2(big_m - top), jnp.exp2(m - top)
        return total * old + part * new, top, big_den * old + den * new

    @reg.inline(arg_types=((LINE,) * 4, (reg.SCALAR,) * 2 * len(ends)), return_type=(_OUT,) * 3)
    def run(_, lines, scalars):
        head = arith.divui(reg.thread(), reg.integer(width))
        m, den = scalars[0].registers.item(), scalars[1].registers.item()
        for k in range(1, len(ends)):
            mine = arith.cmpi(arith.CmpIPredicate.eq, head, reg.integer(k))
            m = arith.select(mine, scalars[2 * k].registers.item(), m)
            den = arith.select(mine, scalars[2 * k + 1].registers.item(), den)
        sums, m0, den0, more = map(_only, lines)
        top, both, old, new = meet_scalars(m0, den0, m, den)
        return tuple(map(_line, (math.fma(sums, old, arith.mulf(more, new)), top, both)))

    return run((total, big_m, big_den, part), tuple(x for e in ends for x in e))


def put_line(total: jax.Array, m: jax.Array, den: jax.Array, out: Any, lse: Any, row, head, heads, d: int) -> None:
    """`finish` of lines, into row `row` of out [T, Hq D] bf16 and lse [T, Hq], for heads from `head`, below `heads`."""
    if interpreting():
        some = jnp.where(den > 0.0, den, 1.0)
        values = (total * jnp.where(den > 0.0, 1.0 / some, 0.0)).astype(jnp.bfloat16)
        ends = m + jnp.log2(some)
        for k in range(128 // d):

            @pl.when(head + k < heads)
            def _(k=k):
                out[row, pl.ds((head + k) * d, d)] = values[k * d : (k + 1) * d]
                lse[row, head + k] = ends[k * d]

        return
    columns, q_heads = out.shape[1], lse.shape[1]

    @reg.inline(arg_types=((LINE,) * 3, reg.PLAIN, reg.PLAIN, *[reg.SCALAR] * 3))
    def run(_, lines, out_ref, lse_ref, *scalars):
        row_, head_, heads_ = (x.registers.item() for x in scalars)
        sums, m_, den_ = map(_only, lines)
        inverse, end = finish_scalars(m_, den_)
        t = reg.thread()
        mine = arith.addi(head_, arith.divui(t, reg.integer(d)))
        bf16, i64 = ir.BF16Type.get(), ir.IntegerType.get_signless(64)
        wide = lambda x: arith.extsi(i64, x)
        with utils.when(reg.below(mine, heads_)):
            at = arith.addi(
                arith.muli(wide(row_), utils.c(columns, i64)), wide(arith.addi(arith.muli(head_, reg.integer(d)), t))
            )
            value = arith.truncf(bf16, arith.mulf(sums, inverse))
            llvm.store(value, utils.getelementptr(utils.memref_ptr(out_ref), [at], bf16))
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(t, reg.integer(d)), reg.integer(0))
            with utils.when(first):
                at = arith.addi(arith.muli(wide(row_), utils.c(q_heads, i64)), wide(mine))
                llvm.store(end, utils.getelementptr(utils.memref_ptr(lse_ref), [at], ir.F32Type.get()))

    run((total, m, den), out, lse, row, head, heads)


def _only(x: Any) -> Any:
    [r] = x.registers.flat
    return reg.element(r, 0)


def _line(x: Any) -> Any:
    regs = np.empty((1,), object)
    regs[0] = vector.broadcast(ir.VectorType.get((1,), x.type), x)
    return mgpu.FragmentedArray(_registers=regs, _layout=LINE.to_mgpu(), _is_signed=None)
