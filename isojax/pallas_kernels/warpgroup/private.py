"""A sum kept in SMEM, fp32 [panels x 64 x 64] of one warpgroup: only the thread that put a register there gets it back.

Its order is that of the threads, so nothing but `fold` can read it.
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


def fold(sums: Any, old: jax.Array, acc: Sequence[jax.Array], new: jax.Array, *, keep: bool) -> tuple[jax.Array, ...]:
    """old times what is in `sums`, plus new times acc (panels), the second product rounded, the sum fused.

    keep: the sum goes back there, and nothing is returned; else panels of it. A few registers at a time: two sums do
    not fit. sums None stands for zeros.
    """
    count = len(acc)
    if interpreting():
        total = [jnp.zeros_like(a) for a in acc] if sums is None else tuple(sums[...].reshape(count, 64, 64))
        both = tuple(t * old[:, None] + a * new[:, None] for t, a in zip(total, acc, strict=True))
        if keep:
            put(sums, both)
        return () if keep else both
    refs = () if sums is None else (sums,)
    returns = () if keep else tuple(reg.acc(64) for _ in acc)

    @reg.inline(arg_types=((reg.ACC,) * count, reg.ROW, reg.ROW, *[reg.PLAIN] * len(refs)), return_type=returns)
    def run(_, accs, old_row, new_row, *smem):
        a, b = reg.scalars(old_row), reg.scalars(new_row)
        x = np.concatenate([reg.scalars(part) for part in accs])
        slots = _slots(smem[0], len(x)) if smem else [None] * len(x)
        for first in range(0, len(x), 4):
            some = range(first, first + 4)
            before = [[reg.constant(0.0)] * 4 if slots[i] is None else _load4(slots[i]) for i in some]
            for i, four in zip(some, before, strict=True):
                for (half, e), t in zip(np.ndindex(2, 2), four, strict=True):
                    x[i, half, e] = math.fma(t, a[half], arith.mulf(x[i, half, e], b[half]))
                if keep:
                    _store4(list(x[i].flat), slots[i])
        return () if keep else tuple(reg.value(part) for part in np.split(x, count))

    return run(tuple(acc), old, new, *refs)


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
