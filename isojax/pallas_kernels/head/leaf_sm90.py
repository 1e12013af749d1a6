"""A vocabulary leaf of a row of logits in shared memory: it comes in one piece, and is read as 64 tiles at a time.

Below Pallas, which cuts a copy into boxes of 256 elements, and whose reads of a block's rows all meet in one bank.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from isojax._jax_internals import barrier_address, interpreting
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.lse import BLOCK, MASKED
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32, i32
from isojax.schedule import LOG2E, VOCAB_TILE

EIGHTS = VOCAB_TILE // 8  # of a tile; a thread holds two columns of each, of two rows


def fetch(source: Any, row: jax.Array, begin: jax.Array, leaf: Any, slot: jax.Array, barrier: Any) -> None:
    """Copy source[row, begin :] to leaf[slot], behind one arrival; fp32 matrices, begin and leaf's width in fours.

    One thread starts it: it must know that nobody reads the SMEM any more.
    """
    columns, width = source.shape[1], leaf.shape[1]
    if interpreting():
        plgpu.copy_gmem_to_smem(source.at[row, pl.ds(begin, width)], leaf.at[slot], barrier)
        return

    @reg.inline(arg_types=(reg.SCALAR, reg.PLAIN, reg.PLAIN, *[reg.SCALAR] * 3))
    def run(_, address, gmem, smem, *scalars):
        i64, kind = ir.IntegerType.get_signless(64), ir.F32Type.get()
        row_, begin_, slot_ = (arith.extsi(i64, x.registers.item()) for x in scalars)
        element = lambda ref, r, n, c: utils.getelementptr(
            utils.memref_ptr(ref), [arith.addi(arith.muli(r, utils.c(n, i64)), c)], kind
        )
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.registers.item())
        ready = utils.BarrierRef(pointer, reg.integer(0), None, 1)  # pyright: ignore
        to, at = element(smem, slot_, width, utils.c(0, i64)), element(gmem, row_, columns, begin_)
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            ready.arrive(127)  # with the next line, the 128 that Mosaic expects of a warpgroup
            ready.arrive_expect_tx(4 * width)
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [to, at, reg.integer(4 * width), pointer],
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                "r,l,r,r",
                has_side_effects=True,
                asm_dialect=0,
            )

    run(barrier_address(barrier), source, leaf, *(jnp.asarray(x, i32) for x in (row, begin, slot)))


def statistics(leaf: Any, slot: jax.Array, first: jax.Array, count: jax.Array, inv: jax.Array):
    """lse.tile of the tiles from `first` on of leaf[slot], its logits multiplied by inv: maximum and sum, [64].

    The same operations in the same order, the rows of a block in two halves. From `count` (1 to 64) on rows repeat some
    tile of the leaf. leaf: fp32 [slots, width] in SMEM, after which one more tile may be read.
    """
    width = leaf.shape[1]
    if interpreting():
        flat = jnp.concatenate([leaf[slot, :], jnp.full((BLOCK[0] * VOCAB_TILE,), jnp.nan, f32)])
        raw = jax.lax.dynamic_slice_in_dim(flat, first * VOCAB_TILE, BLOCK[0] * VOCAB_TILE).reshape(BLOCK)
        left = width - (first + jnp.arange(BLOCK[0])[:, None]) * VOCAB_TILE
        return shared.tile(raw * inv, jnp.arange(VOCAB_TILE)[None] < left)[1:]

    @reg.inline(arg_types=(reg.PLAIN, *[reg.SCALAR] * 4), return_type=(reg.ROW_OUT, reg.ROW_OUT))
    def run(_, smem, *scalars):
        slot_, first_, count_, inv_ = (x.registers.item() for x in scalars)
        base = arith.addi(arith.muli(slot_, reg.integer(width)), reg.column())
        ends = []
        for half in range(2):
            tile = arith.addi(first_, arith.minsi(reg.row(half), arith.subi(count_, reg.integer(1))))
            start = arith.muli(tile, reg.integer(VOCAB_TILE))
            left = arith.subi(arith.subi(reg.integer(width), start), reg.column())
            raw = _columns(smem, arith.addi(base, start))
            ends.append(_tile(raw, inv_, left))
        return tuple(reg.value(np.array(x, object)) for x in zip(*ends, strict=True))

    return run(leaf, *(jnp.asarray(x, i32) for x in (slot, first, count)), jnp.asarray(inv, f32))


def _columns(smem: Any, at: Any) -> np.ndarray:
    """[eighth, 2]: this thread's columns of the tile from element `at` on.

    All tiles begin in the same bank, so four neighbouring rows read four eighths each in an order of their own.
    """
    i64, kind = ir.IntegerType.get_signless(64), ir.F32Type.get()
    pair = ir.VectorType.get((2,), kind)
    turn = arith.andi(arith.divui(reg.thread(), reg.integer(4)), reg.integer(3))
    bit = lambda k: arith.cmpi(arith.CmpIPredicate.ne, arith.andi(turn, reg.integer(k)), reg.integer(0))
    odd, high = bit(1), bit(2)
    starts = []
    for k in range(4):
        eighth = arith.andi(arith.addi(turn, reg.integer(k)), reg.integer(3))
        index = arith.addi(at, arith.muli(eighth, reg.integer(8)))
        starts.append(utils.getelementptr(utils.memref_ptr(smem), [arith.extsi(i64, index)], kind))
    out = np.empty((EIGHTS, 2), object)
    for a in range(0, EIGHTS, 4):
        read = [llvm.load(pair, utils.getelementptr(s, [8 * a], kind)) for s in starts]  # k holds eighth k + turn
        read = [arith.select(odd, read[k - 1], read[k]) for k in range(4)]
        read = [arith.select(high, read[k - 2], read[k]) for k in range(4)]
        for k, e in np.ndindex(4, 2):
            out[a + k, e] = reg.element(read[k], e)
    return out


def _tile(raw: np.ndarray, inv: Any, left: Any) -> tuple[Any, Any]:
    """Scalars: maximum and sum of a tile, whose columns lie in four threads; `left` of this one's are in the leaf."""
    kind = ir.F32Type.get()
    asm = lambda text, *xs: llvm.inline_asm(kind, xs, text, ",".join(["=f"] + ["f"] * len(xs)), asm_dialect=0)
    z, hidden = np.empty_like(raw), reg.constant(-np.inf)
    for i, e in np.ndindex(*z.shape):
        inside = arith.cmpi(arith.CmpIPredicate.sgt, left, reg.integer(8 * i + e))
        # a product that no subtraction contracts, as lse.scaled has it
        z[i, e] = arith.select(inside, asm("mul.rn.f32 $0, $1, $2;", raw[i, e], inv), hidden)
    top = reg.over_quad(arith.maximumf, functools.reduce(arith.maximumf, z.flat, reg.constant(MASKED)))
    for i, e in np.ndindex(*z.shape):
        z[i, e] = asm("ex2.approx.f32 $0, $1;", arith.mulf(arith.subf(z[i, e], top), reg.constant(LOG2E)))
    add = lambda values: functools.reduce(arith.addf, values)
    mass = add([arith.addf(add(z[0::2, e]), add(z[1::2, e])) for e in range(2)])  # Mosaic's order in this layout
    return top, reg.over_quad(arith.addf, mass)
