"""Part of a vocabulary leaf of a row of logits in shared memory: it comes in four pieces, and stays for two uses.

A slot has a piece of at most 16 tiles for each warp of a warpgroup, and a gap after each: two threads take a tile's
halves, 16 bytes at a time, and the eight whose accesses go together are at tiles of all four pieces, thus in different
banks. Below Pallas, which cuts a copy into boxes of 256 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf

from isojax._jax_internals import barrier_address, interpreting
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.lse import MASKED
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32, i32
from isojax.schedule import LOG2E, VOCAB_TILE

PIECES = 4  # of a slot: one for each warp of a warpgroup
MOST_TILES = 64  # of a slot: two threads a tile
GAP = 8  # fp32 after each piece
STEPS = VOCAB_TILE // 8  # 16-byte accesses of a thread in its half of a tile
WARP = 32
NAP = 100  # ns
ARRIVALS = 128  # that Mosaic expects of a warpgroup


def slot_shape(tiles: int) -> tuple[int, int]:
    """(pieces, fp32 of each) of a slot for that many tiles."""
    return PIECES, -(-tiles // PIECES) * VOCAB_TILE + GAP


def fetches() -> int:
    """How often one `fetch` arrives at its barrier."""
    return PIECES if interpreting() else 1


def fetch(source: Any, row: Any, begin: Any, columns: Any, sizes: Iterable[int], ring: Any, slot: Any, barrier: Any):
    """Copy source[row, begin : begin + columns] to ring[slot]; begin and columns in fours.

    source: fp32 [T, V] in GMEM. ring: [slots, *slot_shape] in SMEM. `columns` is one of `sizes`. One thread starts it:
    it must know that nobody reads the slot any more.
    """
    wide, pitch, width = ring.shape[2] - GAP, ring.shape[2], source.shape[1]
    if interpreting():

        def run(size):
            for p, (first, count) in enumerate(_pieces(wide, size)):  # an empty piece arrives too
                at, n = (0, count) if count else (wide, GAP)
                here = source.at[row, pl.ds(begin + first if count else begin, n)]
                plgpu.copy_gmem_to_smem(here, ring.at[slot, p, pl.ds(at, n)], barrier)

        _whichever(columns, sizes, run)
        return

    @reg.inline(arg_types=(reg.SCALAR, reg.PLAIN, reg.PLAIN, *[reg.SCALAR] * 4))
    def go(_, address, gmem, smem, *scalars):
        row_, begin_, columns_, slot_ = (x.registers.item() for x in scalars)
        barrier_ = barrier_at(address)
        to = element(smem, arith.muli(slot_, reg.integer(PIECES * pitch)))
        at = element(gmem, _in_row(row_, width, begin_))
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            expect(barrier_, arith.muli(columns_, reg.integer(4)))
            for p in range(PIECES):
                left = arith.subi(columns_, reg.integer(p * wide))
                utils.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
                    utils.getelementptr(to, [p * pitch], ir.F32Type.get()),
                    utils.getelementptr(at, [p * wide], ir.F32Type.get()),
                    arith.muli(arith.minsi(left, reg.integer(wide)), reg.integer(4)),
                    barrier_.get_ptr(),
                    predicate=reg.below(reg.integer(0), left),
                    has_side_effects=True,
                )

    go(barrier_address(barrier), source, ring, *(jnp.asarray(x, i32) for x in (row, begin, columns, slot)))


def sleep(duration: int) -> None:
    """Let this warpgroup wait for about so many ns; an instruction's own sleep may be twice as long as asked for."""
    if interpreting():
        return

    @reg.inline(arg_types=())
    def go(_):
        for _ in range(duration // NAP):
            utils.inline_ptx(f"nanosleep.u32 {NAP};", has_side_effects=True)

    go()


def statistics(
    ring: Any, slot: Any, columns: Any, sizes: Iterable[int], inv: jax.Array, tops: Any, masses: Any, at: Any
):
    """lse.tile of the tiles of ring[slot], its logits multiplied by inv: maxima to tops[at :], sums to masses[at :].

    The same operations in the same order, but for what no rounding can show: the order of maxima, and exponentials
    below 2^-126 as 0 in a sum that is at least 1. tops, masses: flat fp32 in SMEM.
    """
    wide, pitch = ring.shape[2] - GAP, ring.shape[2]
    each = wide // VOCAB_TILE  # tiles of a piece
    if interpreting():

        def run(size):
            flat = jnp.concatenate([ring[slot, p, pl.ds(0, n)] for p, (_, n) in enumerate(_pieces(wide, size)) if n])
            tiles = -(-size // VOCAB_TILE)
            raw = jnp.full((MOST_TILES * VOCAB_TILE,), jnp.nan, f32).at[:size].set(flat).reshape(MOST_TILES, -1)
            left = size - jnp.arange(MOST_TILES)[:, None] * VOCAB_TILE
            _, top, mass = shared.tile(raw * inv, jnp.arange(VOCAB_TILE)[None] < left)
            tops[pl.ds(at, tiles)], masses[pl.ds(at, tiles)] = top[:tiles], mass[:tiles]

        _whichever(columns, sizes, run)
        return

    @reg.inline(arg_types=(*[reg.PLAIN] * 3, *[reg.SCALAR] * 5))
    def go(_, smem, tops_, masses_, *scalars):
        slot_, columns_, at_, wg, inv_ = (x.registers.item() for x in scalars)
        warp, lane = place()
        # the last warps have less to do, or nothing: of each warpgroup others, which other schedulers serve
        warp = arith.remui(arith.addi(warp, wg), reg.integer(PIECES))
        half, pair = arith.remui(lane, reg.integer(2)), arith.divui(lane, reg.integer(2))
        piece = arith.remui(pair, reg.integer(PIECES))
        index = _sum(arith.muli(warp, reg.integer(4)), arith.divui(pair, reg.integer(PIECES)))
        tile, offset = _sum(arith.muli(piece, reg.integer(each)), index), arith.muli(half, reg.integer(4))
        left = arith.subi(columns_, _sum(arith.muli(tile, reg.integer(VOCAB_TILE)), offset))
        line = arith.minsi(index, reg.integer(each - 1))  # past the piece: its last tile once more
        start = _sum(
            arith.muli(slot_, reg.integer(PIECES * pitch)),
            arith.muli(piece, reg.integer(pitch)),
            arith.muli(line, reg.integer(VOCAB_TILE)),
            offset,
        )

        def run(left_):
            top, mass = _tile(_half(element(smem, start)), inv_, left_)
            mine = arith.andi(reg.below(index, reg.integer(each)), reg.below(reg.integer(0), left))
            with utils.when(arith.andi(mine, arith.cmpi(arith.CmpIPredicate.eq, half, reg.integer(0)))):
                llvm.store(top, element(tops_, arith.addi(at_, tile)))
                llvm.store(mass, element(masses_, arith.addi(at_, tile)))

        with utils.when(reg.below(arith.muli(warp, reg.integer(4)), reg.integer(each))):
            cut = arith.andi(reg.below(reg.integer(0), left), reg.below(left, reg.integer(VOCAB_TILE - 4)))
            some = nvvm.vote_sync(reg.integer(-1), cut, nvvm.VoteSyncKind.any)  # of this warp's tiles
            branch: Any = scf.IfOp(some, has_else=True)
            for block, left_ in ((branch.then_block, left), (branch.else_block, None)):
                with ir.InsertionPoint(block):
                    run(left_)
                    scf.yield_([])

    integers = (jnp.asarray(x, i32) for x in (slot, columns, at, lax.axis_index("wg")))
    go(ring, tops, masses, *integers, jnp.asarray(inv, f32))


def subtract(
    ring: Any, slot: Any, columns: Any, sizes: Iterable[int], inv: Any, norm: Any, out: Any, row: Any, begin: Any
):
    """out[row, begin : begin + columns] = ring[slot] inv - norm, the product rounded. A warp takes a piece."""
    wide, pitch, width = ring.shape[2] - GAP, ring.shape[2], out.shape[1]
    if interpreting():

        def run(size):
            for p, (first, n) in enumerate(_pieces(wide, size)):
                if n:
                    raw = ring[slot, p, pl.ds(0, n)]
                    out[row, pl.ds(begin + first, n)] = shared.scaled(raw, inv) - norm

        _whichever(columns, sizes, run)
        return

    @reg.inline(arg_types=(reg.PLAIN, reg.PLAIN, *[reg.SCALAR] * 6))
    def go(_, smem, gmem, *scalars):
        slot_, columns_, row_, begin_, inv_, norm_ = (x.registers.item() for x in scalars)
        kind = ir.F32Type.get()
        warp, lane = place()
        four, mine = ir.VectorType.get((4,), kind), arith.muli(lane, reg.integer(4))
        first = arith.addi(arith.muli(warp, reg.integer(wide)), mine)
        left = arith.subi(columns_, first)
        to = element(gmem, _in_row(row_, width, arith.addi(begin_, first)))
        slots, pieces = arith.muli(slot_, reg.integer(PIECES * pitch)), arith.muli(warp, reg.integer(pitch))
        source = element(smem, _sum(slots, pieces, mine))
        for at in range(0, wide, VOCAB_TILE):
            read = llvm.load(four, utils.getelementptr(source, [at], kind), alignment=16)
            utils.inline_ptx(
                "st.global.v4.f32 [$0], {$1, $2, $3, $4};",
                utils.getelementptr(to, [at], kind),
                *[arith.subf(_product(reg.element(read, e), inv_), norm_) for e in range(4)],
                predicate=reg.below(reg.integer(at), left),
                has_side_effects=True,
            )

    integers = (jnp.asarray(x, i32) for x in (slot, columns, row, begin))
    go(ring, out, *integers, jnp.asarray(inv, f32), jnp.asarray(norm, f32))


def _pieces(wide: int, columns: int) -> list[tuple[int, int]]:
    """(first column, columns) of each piece of a part."""
    return [(p * wide, max(0, min(wide, columns - p * wide))) for p in range(PIECES)]


def _whichever(columns: Any, sizes: Iterable[int], run: Callable[[int], None]) -> None:
    """run(size) for the one of the sizes that `columns` is: the interpreter's copies are of a fixed size."""
    for size in sizes:
        pl.when(columns == size)(functools.partial(run, size))


def _half(source: Any) -> np.ndarray:
    """[step, 4]: this thread's half of a tile."""
    kind = ir.F32Type.get()
    four, out = ir.VectorType.get((4,), kind), np.empty((STEPS, 4), object)
    for i in range(STEPS):
        read = llvm.load(four, utils.getelementptr(source, [8 * i], kind), alignment=16)
        out[i] = [reg.element(read, e) for e in range(4)]
    return out


def _tile(raw: np.ndarray, inv: Any, left: Any | None) -> tuple[Any, Any]:
    """Scalars: maximum and sum of a tile, whose halves lie in two threads; `left` of this one's columns are inside.

    left: None where all of them are.

    The sum's order is Mosaic's in lse.LAYOUT: a column of even and of odd eighths, neighbours, then what four threads
    had there and two have here.
    """
    hidden = reg.constant(-np.inf)
    inside = lambda i, e: reg.below(reg.integer(8 * i + e), left)
    z = reg.each(lambda x: _product(x, inv), raw)
    for i, e in np.ndindex(*z.shape) if left is not None else ():
        z[i, e] = arith.select(inside(i, e), z[i, e], hidden)
    both = lambda op, x: op(x, utils.shfl_bfly(x, 1))
    largest = lambda values: functools.reduce(arith.maximumf, values)
    top = both(arith.maximumf, arith.maximumf(largest([largest(z[:, e]) for e in range(4)]), reg.constant(MASKED)))
    sums = np.empty((2, 4), object)
    for i, e in np.ndindex(*z.shape):
        share = reg.exp2(arith.mulf(arith.subf(z[i, e], top), reg.constant(LOG2E)))
        sums[i % 2, e] = share if i < 2 else arith.addf(sums[i % 2, e], share)
    s = [arith.addf(*sums[:, e]) for e in range(4)]
    return top, both(arith.addf, arith.addf(arith.addf(s[0], s[1]), arith.addf(s[2], s[3])))


# -- scalars -----------------------------------------------------------------------------------------------------------
def place() -> tuple[Any, Any]:
    """(warp of the warpgroup, lane) of this thread."""
    thread = reg.thread()
    return arith.divui(thread, reg.integer(WARP)), arith.remui(thread, reg.integer(WARP))


def element(ref: Any, index: Any) -> Any:
    """Address of an fp32 element, counted through the whole ref."""
    i64 = ir.IntegerType.get_signless(64)
    wide = index if index.type == i64 else arith.extsi(i64, index)
    return utils.getelementptr(utils.memref_ptr(ref), [wide], ir.F32Type.get())


def barrier_at(address: Any) -> Any:
    """The barrier at `barrier_address`."""
    pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address.registers.item())
    return utils.BarrierRef(pointer, reg.integer(0), None, 1)  # pyright: ignore


def expect(barrier: Any, count: Any) -> None:
    """The whole arrival of a warpgroup, and of that many bytes, by one thread."""
    barrier.arrive(ARRIVALS - 1)
    barrier.arrive_expect_tx(count)


def _in_row(row: Any, columns: int, column: Any) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(arith.muli(arith.extsi(i64, row), utils.c(columns, i64)), arith.extsi(i64, column))


def _sum(*terms: Any) -> Any:
    return functools.reduce(arith.addi, terms)


def _product(a: Any, b: Any) -> Any:
    """A product that no addition contracts, as lse.scaled has it."""
    return llvm.inline_asm(ir.F32Type.get(), [a, b], "mul.rn.f32 $0, $1, $2;", "=f,f,f", asm_dialect=0)
