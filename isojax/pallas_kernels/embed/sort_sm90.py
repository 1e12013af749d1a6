"""Positions sorted by (token, position) on sm90: the rank of each is counted, as how many come before it.

A block ranks 64 positions by comparing their tokens with all others; its warpgroups share those. Compared are fp32
numbers, since an addition that saturates at 1 counts where an integer comparison would take twice the time. Many
positions are sorted in runs, and the ranks among all found in the other runs by bisection.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.interpretable import await_previous, let_next_start
from isojax.pallas_kernels.warpgroup import registers as reg

f32, i32 = jnp.float32, jnp.int32
POSITIONS = 64  # that a block ranks, and that a warpgroup compares them with at a time
WARPGROUPS = 4
AHEAD = 4  # times POSITIONS that a warpgroup compares with while the next ones are on their way
RUN = 512  # positions of a run
DIRECT = 2048  # positions up to which all are compared
KEYS = 32  # that a block of the second step ranks: four threads each
SEARCHES = 8  # of a thread at a time
MOST_POSITIONS = 1 << 17
MOST_TOKENS = 1 << 24  # fp32 holds each of them
BLOCK = (POSITIONS, POSITIONS)
LAYOUT: Any = plgpu.Layout.WGMMA
ROW, COLUMN = (LAYOUT.reduce(axis) for axis in (1, 0))


def sort(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """tokens [T] int32 below MOST_TOKENS -> positions ordered by (token, position), tokens in that order; int32 [T]."""
    n = tokens.shape[0]
    return sort_runs(tokens, n) if n <= DIRECT else merge(*sort_runs(tokens, RUN), RUN)


def sort_runs(tokens: jax.Array, run: int) -> tuple[jax.Array, jax.Array]:
    """`sort` of each `run` neighbouring positions, a multiple of POSITIONS; the last ones may be fewer."""
    n = tokens.shape[0]
    blocks, each = n // POSITIONS, min(run, n) // POSITIONS
    ahead = min(AHEAD, -(-each // WARPGROUPS))
    trips = -(-each // (WARPGROUPS * ahead))

    def embed_sort(tokens, order, ranked, counts, done):
        tile, wg = lax.axis_index("tile"), lax.axis_index("wg")
        first = tile * POSITIONS
        begin = tile - lax.rem(tile, each)  # of the run, and where it ends
        end = lax.min(begin + each, blocks)
        along = lambda v, axis: plgpu.layout_cast(lax.broadcast_in_dim(v, BLOCK, [axis]), LAYOUT)
        read = lambda at, layout: plgpu.load(tokens.at[pl.ds(at, POSITIONS)], layout=layout, optimized=False)
        own = read(first, ROW)
        index = lambda i, k: begin + (i * ahead + k) * WARPGROUPS + wg
        fetch = lambda i: tuple(read(lax.min(index(i, k), end - 1) * POSITIONS, COLUMN) for k in range(ahead))

        def compare(i, carry):
            count, some = carry
            after = fetch(i + 1)
            for k, others in enumerate(some):
                j = index(i, k)
                past = jnp.where(j < end, 0, MOST_TOKENS)  # above every token
                # equal tokens count where they stand before: a whole block of them does, or none of it
                limit = own + jnp.where(j < tile, 1, 0)
                count = count + at_least_1(along(limit.astype(f32), 0), along((others + past).astype(f32), 1))
            return count, after

        count = plgpu.layout_cast(jnp.zeros(BLOCK, f32), LAYOUT)
        count, _ = lax.fori_loop(0, trips, compare, (count, fetch(0)))
        row, column = (plgpu.broadcasted_iota(i32, BLOCK, axis, layout=LAYOUT) for axis in (0, 1))
        earlier = (along(read(first, COLUMN), 1) == along(own, 0)) & (column < row) & (wg == 0)
        counts[wg] = jnp.sum(count + jnp.where(earlier, 1.0, 0.0), axis=1).astype(i32)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

        def place(i, _):
            at = wg * (POSITIONS // WARPGROUPS) + i
            rank = begin * POSITIONS + sum(counts[k, at] for k in range(WARPGROUPS))
            order[rank] = first + at
            ranked[rank] = tokens[first + at]

        lax.fori_loop(0, POSITIONS // WARPGROUPS, place, None)
        let_next_start()

    out = jax.ShapeDtypeStruct((n,), i32)
    return plgpu.kernel(
        embed_sort,
        out_type=(out, out),
        scratch_types=(plgpu.SMEM((WARPGROUPS, POSITIONS), i32), plgpu.Barrier(num_arrivals=WARPGROUPS)),
        grid=(blocks,),
        grid_names=("tile",),
        num_threads=WARPGROUPS,
        thread_name="wg",
    )(tokens)


def merge(positions: jax.Array, tokens: jax.Array, run: int) -> tuple[jax.Array, jax.Array]:
    """From runs that are sorted to all of them sorted: of each key, how many of every other run come before it."""
    n = tokens.shape[0]
    runs = -(-n // run)

    def embed_merge(positions, tokens, order, ranked):
        await_previous()
        let_next_start()
        first = lax.axis_index("block") * KEYS
        if interpreting():
            for i in range(KEYS):
                at = first + i
                token, mine = tokens[at], lax.div(at, run)
                rank = at - mine * run
                for r in range(runs):
                    some = tokens[pl.ds(r * run, min(run, n - r * run))]
                    before = jnp.sum(jnp.where(some < token + jnp.where(r < mine, 1, 0), 1, 0))
                    rank += jnp.where(r == mine, 0, before)
                order[rank], ranked[rank] = positions[at], token
            return
        _place(positions, tokens, order, ranked, first, n, run)

    out = jax.ShapeDtypeStruct((n,), i32)
    return plgpu.kernel(
        embed_merge,
        out_type=(out, out),
        grid=(n // KEYS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(positions, tokens)


def _place(positions: Any, tokens: Any, order: Any, ranked: Any, first: jax.Array, n: int, run: int) -> None:
    """Write KEYS keys where they belong among all. Below Pallas, whose threads cannot look in different places."""
    runs, threads = -(-n // run), 4

    @reg.inline(arg_types=(*[reg.PLAIN] * 4, reg.SCALAR))
    def go(_, positions_, tokens_, order_, ranked_, first_):
        kind = ir.IntegerType.get_signless(32)
        i64 = ir.IntegerType.get_signless(64)
        element = lambda ref, i: utils.getelementptr(utils.memref_ptr(ref), [arith.extsi(i64, i)], kind)
        thread, zero = reg.thread(), reg.integer(0)
        share = arith.remui(thread, reg.integer(threads))
        at = arith.addi(first_.registers.item(), arith.divui(thread, reg.integer(threads)))
        token = llvm.load(kind, element(tokens_, at))
        mine = arith.divui(at, reg.integer(run))

        def before(r):
            """How many of run r come before the key; 0 in its own, and where there is no run."""
            start = arith.muli(r, reg.integer(run))
            length = arith.maxsi(arith.minsi(arith.subi(reg.integer(n), start), reg.integer(run)), zero)
            length = arith.select(arith.cmpi(arith.CmpIPredicate.eq, r, mine), zero, length)
            limit = arith.addi(token, arith.extui(kind, reg.below(r, mine)))  # equal ones of earlier runs do
            found, step = zero, 1 << run.bit_length() - 1
            while step:
                last = arith.addi(found, reg.integer(step - 1))
                inside = reg.below(last, length)
                place = arith.minsi(arith.addi(start, last), reg.integer(n - 1))
                small = reg.below(llvm.load(kind, element(tokens_, place)), limit)
                found = arith.select(arith.andi(inside, small), arith.addi(found, reg.integer(step)), found)
                step //= 2
            return found

        own = arith.subi(at, arith.muli(mine, reg.integer(run)))
        count = arith.select(arith.cmpi(arith.CmpIPredicate.eq, share, zero), own, zero)
        trips = -(-runs // (threads * SEARCHES))
        loop = scf.ForOp(zero, reg.integer(trips), reg.integer(1), [count])
        with ir.InsertionPoint(loop.body):
            total = loop.inner_iter_args[0]
            for i in range(min(SEARCHES, -(-runs // threads))):
                r = arith.addi(arith.muli(loop.induction_variable, reg.integer(SEARCHES)), reg.integer(i))
                total = arith.addi(total, before(arith.addi(arith.muli(r, reg.integer(threads)), share)))
            scf.yield_([total])
        rank = reg.over_quad(arith.addi, loop.result)
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, share, zero)):
            llvm.store(llvm.load(kind, element(positions_, at)), element(order_, rank))
            llvm.store(token, element(ranked_, rank))

    go(positions, tokens, order, ranked, first)


def at_least_1(a: jax.Array, b: jax.Array) -> jax.Array:
    """1 where a - b is 1 or more, 0 where it is 0 or less; whole numbers in fp32 [64, 64]."""
    if interpreting():
        return jnp.clip(a - b, 0.0, 1.0)

    @reg.inline(arg_types=(LAYOUT, LAYOUT), return_type=plgpu.ShapeDtypeStruct(BLOCK, f32, layout=LAYOUT))
    def run(_, x, y):
        kind, out = ir.F32Type.get(), np.empty_like(x.registers)
        for at in np.ndindex(*out.shape):
            pairs = [(reg.element(x.registers[at], e), reg.element(y.registers[at], e)) for e in range(2)]
            differences = [llvm.inline_asm(kind, p, "sub.sat.f32 $0, $1, $2;", "=f,f,f", asm_dialect=0) for p in pairs]
            out[at] = vector.from_elements(ir.VectorType.get((2,), kind), differences)
        return mgpu.FragmentedArray(_registers=out, _layout=x.layout, _is_signed=None)

    return run(a, b)
