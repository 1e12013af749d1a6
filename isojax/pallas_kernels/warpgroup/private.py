"""Kept in SMEM: a sum, fp32 [panels x 64 x 64] of one warpgroup, and rows [64] beside it.

Only the thread that put a register there gets it back. The order is that of the threads, so nothing but these functions
can read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg


def put(ref: Any, acc: Sequence[jax.Array]) -> None:
    """Keep panels [64, 64] there."""
    if interpreting():
        ref[...] = jnp.stack(list(acc)).reshape(-1)
        return

    @reg.inline(arg_types=(reg.PLAIN, *[reg.ACC] * len(acc)))
    def run(_, smem, *args):
        regs = [x for a in args for x in reg.scalars(a).flat]
        for i, slot in enumerate(_slots(smem, len(regs) // 4)):
            _store4(regs[4 * i : 4 * i + 4], slot)

    run(ref, *acc)


def keep_rows(ref: Any, a: jax.Array, b: jax.Array) -> None:
    """Keep rows a and b [64] in `ref`, fp32 [128]; `kept_rows` gives them back. Threads of a row write the same."""
    if interpreting():
        ref[:64], ref[64:] = a, b
        return

    @reg.inline(arg_types=(reg.PLAIN, reg.ROW, reg.ROW))
    def run(_, smem, *rows):
        utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)  # what was there has been read
        _store4([x for row in rows for x in reg.scalars(row)], _of_row(smem))
        utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)

    run(ref, a, b)


def kept_rows(ref: Any) -> tuple[jax.Array, jax.Array]:
    if interpreting():
        return ref[:64], ref[64:]

    @reg.inline(arg_types=(reg.PLAIN,), return_type=(reg.ROW_OUT, reg.ROW_OUT))
    def run(_, smem):
        a, b, c, d = _load4(_of_row(smem))
        return tuple(reg.value(np.array(two, object)) for two in ((a, b), (c, d)))

    return run(ref)


def fold(
    sums: Any, held: jax.Array, old: jax.Array, acc: Sequence[jax.Array], new: jax.Array, *, keep: bool
) -> tuple[jax.Array, ...]:
    """old times a sum, plus new times acc (panels), the second product rounded, the sum fused.

    The sum's first columns are `held` [64, n], and its others are what `put` or this left in `sums`; sums None stands
    for zeros there. -> (held,), the rest being in `sums` again, where `keep`; else panels. A few registers at a time:
    two sums do not fit.
    """
    count, n = len(acc), held.shape[1]
    if interpreting():
        before = jnp.zeros((count, 64, 64), jnp.float32) if sums is None else sums[...].reshape(count, 64, 64)
        total = jnp.concatenate([held, jnp.concatenate(list(before), 1)[:, n:]], 1)
        both = total * old[:, None] + jnp.concatenate(list(acc), 1) * new[:, None]
        panels = tuple(jnp.split(both, count, 1))
        if keep:
            put(sums, panels)
        return (both[:, :n],) if keep else panels
    refs = () if sums is None else (sums,)
    arguments = (reg.ACC,) * count, reg.ACC, reg.ROW, reg.ROW, *[reg.PLAIN] * len(refs)
    returns = (reg.acc(n),) if keep else tuple(reg.acc(64) for _ in acc)

    @reg.inline(arg_types=arguments, return_type=returns)
    def run(_, accs, first, old_row, new_row, *smem):
        a, b = reg.scalars(old_row), reg.scalars(new_row)
        x, there = np.concatenate([reg.scalars(part) for part in accs]), reg.scalars(first)
        slots = _slots(smem[0], len(x)) if smem else [None] * len(x)
        groups = [range(i, i + 4) for i in range(0, len(x), 4)]

        def load(i):
            if i < len(there):
                return there[i].flat
            return [reg.constant(0.0)] * 4 if slots[i] is None else _load4(slots[i])

        following = [load(i) for i in groups[0]]
        for some, later in zip(groups, (*groups[1:], ()), strict=True):
            before, following = following, [load(i) for i in later]  # a group ahead of its use
            for i, four in zip(some, before, strict=True):
                for (half, e), t in zip(np.ndindex(2, 2), four, strict=True):
                    x[i, half, e] = math.fma(t, a[half], arith.mulf(x[i, half, e], b[half]))
                if keep and i >= len(there):
                    _store4(list(x[i].flat), slots[i])
        return (reg.value(x[: len(there)]),) if keep else tuple(reg.value(part) for part in np.split(x, count))

    return run(tuple(acc), held, old, new, *refs)


def _of_row(ref: Any) -> Any:
    """Address of the 16 bytes that the four threads of a row share."""
    first = arith.muli(arith.shrui(reg.thread(), reg.integer(2)), reg.integer(4))
    wide = arith.extui(ir.IntegerType.get_signless(64), first)
    return utils.getelementptr(utils.memref_ptr(ref), [wide], ir.F32Type.get())


def _slots(ref: Any, count: int) -> list[Any]:
    """Addresses of the 16 bytes that this thread owns of each 2 KiB: no bank is hit twice."""
    f32_type, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
    first = arith.extui(i64, arith.muli(reg.thread(), reg.integer(4)))
    mine = utils.getelementptr(utils.memref_ptr(ref), [first], f32_type)
    return [utils.getelementptr(mine, [512 * i], f32_type) for i in range(count)]


def _load4(slot: Any) -> list[Any]:
    """Volatile, as is the store: loads of what is needed much later would take registers that are not there."""
    loaded = llvm.load(ir.VectorType.get((4,), ir.F32Type.get()), slot, volatile_=True)
    return [reg.element(loaded, e) for e in range(4)]


def _store4(scalars: list[Any], slot: Any) -> None:
    llvm.store(vector.from_elements(ir.VectorType.get((4,), ir.F32Type.get()), scalars), slot, volatile_=True)
