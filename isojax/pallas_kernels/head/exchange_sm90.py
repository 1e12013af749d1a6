"""The sums of a row's vocabulary leaves, from every block of a cluster to every other, through shared memory.

A leaf's tiles are added by one warp; its result goes straight to the shared memory of all blocks, and tells a barrier
there of its bytes. Below Pallas, which stores to another block only what lies in tiles.

Rows take turns at `sides` places, each with a barrier of its own, since nothing orders what two blocks send. Where a
block sends row k after it has the sums of row k - 1 - ahead, it had all leaves of that row; whoever sent one had the
sums of row k - 2 - 2 ahead, and has read them. So row k may lie where that row lay: 2 + 2 ahead sides.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from isojax._jax_internals import barrier_address, interpreting
from isojax.pallas_kernels.head import lse as shared
from isojax.pallas_kernels.head.leaf_sm90 import WARP, barrier_at, element, expect, place
from isojax.pallas_kernels.head.lse import ROWS
from isojax.pallas_kernels.warpgroup import registers as reg
from isojax.pallas_kernels.warpgroup.registers import f32, i32
from isojax.schedule import LEAVES, LOG2E


def sides(ahead: int) -> int:
    """Rows whose sums may be there, where a block sends a row before it has awaited the `ahead` rows before it."""
    return 2 + 2 * ahead


def barrier(leaves: int, ahead: int) -> Any:
    """One for each side of a block that folds `leaves` leaves. received, its data: SMEM [side, leaf, (max, sum)]."""
    if interpreting():
        return plgpu.ClusterBarrier(collective_axes=("leaf",), num_arrivals=leaves, num_barriers=sides(ahead))
    return plgpu.Barrier(num_arrivals=1, num_barriers=sides(ahead))


def gmem(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """An output [row, leaf, (max, sum)] that the interpreter takes for `received`: no block writes another's SMEM."""
    return (jax.ShapeDtypeStruct((rows, LEAVES, 2), f32),) if interpreting() else ()


def await_sums(barrier: Any) -> None:
    """Let the barrier's phase end once all leaves of a row have been received. For one warpgroup of each block."""
    if interpreting():
        return

    @reg.inline(arg_types=(reg.SCALAR,))
    def go(_, address):
        with utils.when(utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP)):
            expect(barrier_at(address), 8 * LEAVES)

    go(barrier_address(barrier))


def fold(tops: Any, masses: Any, at: Any, each: int, side: Any, leaf: Any, received: Any, barrier: Any, blocks: int):
    """Add the `each` tiles at tops[at :], masses[at :] ascending, weighed against their maximum: lse.weighed.

    Maximum and sum go to received[side, leaf] of all `blocks` of the cluster. One warp does it; the weighed sums stay
    in `masses`, from where all its threads add them: a chain of additions, without shuffles. at: a multiple of 4.
    """
    if interpreting():
        top, mass = (jnp.stack([x[at + i] for i in range(each)]) for x in (tops, masses))
        leaf_top = jnp.max(top)
        shares = shared.weighed(top, mass, leaf_top)
        received[side, leaf, 0] = leaf_top
        received[side, leaf, 1] = lax.fori_loop(0, each, lambda i, t: t + shares[i], jnp.float32(0))
        plgpu.barrier_arrive(barrier)
        return

    @reg.inline(arg_types=(*[reg.PLAIN] * 3, *[reg.SCALAR] * 5))
    def go(_, tops_, masses_, to, *scalars):
        at_, side_, leaf_, wg, address = (x.registers.item() for x in scalars)
        kind, zero = ir.F32Type.get(), reg.constant(0.0)
        warp, lane = place()
        # warpgroups choose different warps, which different schedulers serve
        with utils.when(arith.cmpi(arith.CmpIPredicate.eq, warp, arith.remui(wg, reg.integer(4)))):
            top, mass = [], []
            for first in range(0, each, WARP):
                i = arith.addi(lane, reg.integer(first))
                index = arith.addi(at_, arith.minsi(i, reg.integer(each - 1)))  # past the end: the last one, once more
                top.append(llvm.load(kind, element(tops_, index)))
                mass.append(llvm.load(kind, element(masses_, index)))
            most = functools.reduce(arith.maximumf, top)
            for distance in (1, 2, 4, 8, 16):
                most = arith.maximumf(most, utils.shfl_bfly(most, distance))
            for i, (t, m) in enumerate(zip(top, mass, strict=True)):
                index = arith.addi(lane, reg.integer(i * WARP))
                with utils.when(reg.below(index, reg.integer(each))):
                    llvm.store(_weighed(t, m, most), element(masses_, arith.addi(at_, index)))
            nvvm.bar_warp_sync(reg.integer(-1))
            total = zero
            for first in range(0, each, 4):
                place_ = element(masses_, arith.addi(at_, reg.integer(first)))
                four = llvm.load(ir.VectorType.get((4,), kind), place_, alignment=16)
                for e in range(min(4, each - first)):
                    total = arith.addf(total, reg.element(four, e))
            place_ = arith.addi(arith.muli(side_, reg.integer(LEAVES)), leaf_)
            here = llvm.ptrtoint(ir.IntegerType.get_signless(32), element(to, arith.muli(place_, reg.integer(2))))
            with utils.when(reg.below(lane, reg.integer(blocks))):
                utils.inline_ptx(
                    "{ .reg .b32 a, b;\n mapa.shared::cluster.u32 a, $0, $2;\n mapa.shared::cluster.u32 b, $1, $2;\n"
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [a], {$3, $4}, [b]; }",
                    *(here, address, lane, most, total),
                    has_side_effects=True,
                )

    integers = (jnp.asarray(x, i32) for x in (at, side, leaf, lax.axis_index("wg")))
    go(tops, masses, received, *integers, barrier_address(barrier))


def log_sum_exp(received: Any, side: Any) -> jax.Array:
    """Of the row whose leaves are at received[side]; behind its barrier."""
    spread = lambda i, e: jnp.full((ROWS,), received[side, i, e], f32)
    return jnp.max(shared.log_sum_exp([(spread(i, 0), spread(i, 1)) for i in range(LEAVES)]))  # all are equal


def _weighed(top: Any, mass: Any, leaf_top: Any) -> Any:
    share = reg.exp2(arith.mulf(arith.subf(top, leaf_top), reg.constant(LOG2E)))
    empty = arith.cmpf(arith.CmpFPredicate.OEQ, mass, reg.constant(0.0))
    return arith.select(empty, reg.constant(0.0), arith.mulf(mass, share))
