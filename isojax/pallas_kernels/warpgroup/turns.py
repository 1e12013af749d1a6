"""Two warpgroups that take turns, and one that waits for its own threads."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg

TURNS = 4  # first of the hardware's barriers that Mosaic leaves alone: it has 0, and one for each of three warpgroups


def pass_turn(barrier: Any, to: jax.Array) -> None:
    """Let warpgroup `to` (0 or 1) go on from `take_turn`. barrier: a plgpu.Barrier for each, for the interpreter."""
    if interpreting():
        plgpu.barrier_arrive(barrier.at[to])
    else:
        _at_barrier("arrive", to)


def take_turn(barrier: Any, mine: jax.Array) -> None:
    """Wait for the other warpgroup's `pass_turn`."""
    if interpreting():
        plgpu.barrier_wait(barrier.at[mine])
    else:
        _at_barrier("sync", mine)


def _at_barrier(what: str, whose: jax.Array) -> None:
    """bar.`what` of the 256 threads of both warpgroups, at the barrier of one."""

    @reg.inline(arg_types=(reg.SCALAR,))
    def run(_, w):
        name = arith.addi(w.registers.item(), reg.integer(TURNS))
        utils.inline_ptx(f"bar.{what} $0, 256;", name, has_side_effects=True)

    run(whose)


def warpgroup_barrier() -> None:
    """Every thread of the warpgroup has come here."""
    if interpreting():
        return

    @reg.inline()
    def run(_):
        utils.warpgroup_barrier()

    run()
