"""Copies from GMEM behind one arrival, and registers written to it."""

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
from jaxlib.mlir.dialects import arith, llvm, vector

from isojax._jax_internals import barrier_address, interpreting
from isojax.pallas_kernels.interpretable import BLOCKS_OF_1
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import i32

_ROWS = plgpu.RefType(BLOCKS_OF_1)
Index = Any  # of one GMEM dimension: a scalar, or (start, size)


def arrivals(boxes: int) -> int:
    """Arrivals that a barrier expects of one `fetch` of so many boxes."""
    return boxes if interpreting() else 1


def fetch(barrier: Any, boxes: Sequence[tuple[Any, tuple[Index, ...], Any]], warps: int = 0) -> None:
    """Start TMA copies (GMEM ref, its indices, SMEM of blocks of one row: `landing`), all behind one arrival.

    One thread issues them: it must know that nobody reads the SMEM any more. warps: one thread of each
    of the first so many warps does (2 or 4), each its own boxes (see `warp`), and the arrival is behind all of theirs.
    """
    if interpreting():
        for source, at, into in boxes:
            plgpu.copy_gmem_to_smem(
                source.at[tuple(pl.ds(*i) if isinstance(i, tuple) else i for i in at)], into, barrier
            )
        return
    refs = list({id(source): source for source, *_ in boxes}.values())
    which = [next(k for k, r in enumerate(refs) if r is source) for source, *_ in boxes]
    starts = [jnp.asarray(i[0] if isinstance(i, tuple) else i, i32) for _, at, _ in boxes for i in at]
    total = sum(int(np.prod(into.shape)) * into.dtype.itemsize for *_, into in boxes)
    types = (reg.SCALAR, *[reg.PLAIN] * len(refs), *[_ROWS] * len(boxes), *[reg.SCALAR] * len(starts))

    @reg.inline(arg_types=types)
    def run(context, address, *args):
        sources, targets = args[: len(refs)], args[len(refs) : len(refs) + len(boxes)]
        scalars = iter([_index(x) for x in args[len(refs) + len(boxes) :]])
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.registers.item())
        ready = utils.BarrierRef(pointer, reg.integer(0), None, 1)  # pyright: ignore
        with utils.when(_issuer(warps)):
            ready.arrive(128 // max(1, warps) - 1)  # with the next line, the 128 that Mosaic expects of a warpgroup
            ready.arrive_expect_tx(total)
            for k, (_, at, _), target in zip(which, boxes, targets, strict=True):
                where = [(next(scalars), i) for i in at]
                context.async_copy(
                    src_ref=sources[k],
                    dst_ref=target,
                    gmem_slice=tuple(utils.DynamicSlice(x, i[1]) if isinstance(i, tuple) else x for x, i in where),
                    gmem_transform=(mgpu.TileTransform((1, 64)),),
                    swizzle=128,
                    barrier=ready,
                    arrive=False,
                    predicate=None,
                )

    run(barrier_address(barrier), *refs, *[into for *_, into in boxes], *starts)


def _issuer(warps: int) -> Any:
    """Whether this thread issues copies: one of the warpgroup, or one of each of its first `warps` warps."""
    if not warps:
        return utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)
    elected = utils.single_thread_predicate(utils.ThreadSubset.WARP)
    mine = arith.remui(utils.warp_idx(), reg.integer(4))
    return elected if warps == 4 else arith.andi(elected, reg.below(mine, reg.integer(warps)))


def warp() -> jax.Array:
    """Index of this warp in its warpgroup: a scalar that differs between warps. 0 where interpreted."""
    if interpreting():
        return jnp.int32(0)

    @reg.inline(return_type=plgpu.ShapeDtypeStruct((), i32, layout=reg.SCALAR))
    def run(_):
        mine = arith.remui(utils.warp_idx(), reg.integer(4))
        return mgpu.FragmentedArray.splat(mine, (), is_signed=True)

    return run()


def _index(x: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), x.registers.item())


def count_used(work: Any) -> jax.Array:
    """Rows of int32 [n, 2] in GMEM that do not begin with a negative number; they come first."""
    n = work.shape[0]
    if interpreting():
        return jnp.sum(work[:, 0] >= 0, dtype=i32)

    @reg.inline(arg_types=(reg.PLAIN,), return_type=plgpu.ShapeDtypeStruct((), i32, layout=reg.SCALAR))
    def run(_, ref):
        i32_type, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        lane, total = arith.andi(reg.thread(), reg.integer(31)), reg.integer(0)
        base = utils.memref_ptr(ref)
        for first in range(0, n, 32):  # every warp counts for itself
            row = arith.addi(lane, reg.integer(first))
            there = arith.minsi(row, reg.integer(n - 1))
            at = utils.getelementptr(base, [arith.extsi(i64, arith.muli(there, reg.integer(2)))], i32_type)
            used = arith.cmpi(arith.CmpIPredicate.sge, llvm.load(i32_type, at), reg.integer(0))
            counts = arith.andi(used, reg.below(row, reg.integer(n)))
            total = arith.addi(total, arith.extui(i32_type, counts))
        total = llvm.inline_asm(
            i32_type, [total], "redux.sync.add.s32 $0, $1, 0xffffffff;", "=r,r", has_side_effects=True, asm_dialect=0
        )
        return mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return run(work)


def put_rows(values: jax.Array, ref: Any, start, head, valid, heads, tile: int) -> None:
    """ref[start + r, head + h] = values[h tile + r], for r < valid and h < heads. ref: fp32 [T, H] in GMEM."""
    if interpreting():

        @pl.loop(0, heads)
        def _(h):
            @pl.loop(0, valid)
            def _(r):
                ref[start + r, head + h] = jax.lax.dynamic_index_in_dim(values, h * tile + r, keepdims=False)

        return
    width, shift = ref.shape[1], tile.bit_length() - 1

    @reg.inline(arg_types=(reg.ROW, reg.PLAIN, *[reg.SCALAR] * 4))
    def run(_, rows, out, *scalars):
        base = utils.memref_ptr(out)
        first, head_, valid_, heads_ = (x.registers.item() for x in scalars)
        owner = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(reg.thread(), reg.integer(3)), reg.integer(0))
        for half, value in enumerate(reg.scalars(rows)):
            row = reg.row(half)
            r, h = arith.andi(row, reg.integer(tile - 1)), arith.shrui(row, reg.integer(shift))
            with utils.when(_all(owner, reg.below(r, valid_), reg.below(h, heads_))):
                line = arith.muli(arith.addi(first, r), reg.integer(width))
                llvm.store(value, _at(base, arith.addi(line, arith.addi(head_, h))))

    run(values, ref, start, head, valid, heads)


def put_state(acc: Sequence[jax.Array], m: jax.Array, den: jax.Array, sums: Any, ends: Any) -> None:
    """The first rows of a partition's state into GMEM: sums [rows, D] of acc, ends [2, rows] of m and den; fp32."""
    rows = sums.shape[0]
    if interpreting():
        sums[...] = jnp.concatenate(list(acc), 1)[:rows]
        ends[0], ends[1] = m[:rows], den[:rows]
        return
    width, count = sums.shape[1], len(acc)

    @reg.inline(arg_types=((reg.ACC,) * count, reg.ROW, reg.ROW, reg.PLAIN, reg.PLAIN))
    def run(_, accs, m_row, den_row, sums_ref, ends_ref):
        row = reg.row(0)
        out, tail = utils.memref_ptr(sums_ref), utils.memref_ptr(ends_ref)
        with utils.when(reg.below(row, reg.integer(rows))):
            first = arith.addi(arith.muli(row, reg.integer(width)), reg.column())
            for c, a in enumerate(accs):
                x = reg.scalars(a)
                for i in range(8):
                    two = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [x[i, 0, 0], x[i, 0, 1]])
                    llvm.store(two, _at(out, arith.addi(first, reg.integer(64 * c + 8 * i))))
            owner = arith.cmpi(arith.CmpIPredicate.eq, reg.column(), reg.integer(0))
            with utils.when(owner):
                for k, value in enumerate((reg.scalars(m_row)[0], reg.scalars(den_row)[0])):
                    llvm.store(value, _at(tail, arith.addi(row, reg.integer(k * rows))))

    run(tuple(acc), m, den, sums, ends)


def _all(*conditions: Any) -> Any:
    out = conditions[0]
    for c in conditions[1:]:
        out = arith.andi(out, c)
    return out


def _at(base: Any, index: Any) -> Any:
    return utils.getelementptr(base, [arith.extsi(ir.IntegerType.get_signless(64), index)], ir.F32Type.get())
