"""Steps that Mosaic's GPU interpreter cannot run, each with its substitute. The others are those of `warpgroup`.

landing      TMA from any row of GMEM into a tile that wgmma reads: Mosaic cuts such a tile, and with it the TMA box,
             into blocks of 8 rows, whose GMEM offset must be a multiple of 8. A second view of the same bytes has
             blocks of one row. Interpreted as a copy into the tile itself (views are separate buffers there).
overlaid     SMEM for one use after another. Interpreted as a buffer for each.
publish      A fence between a block's writes to GMEM and its arrival at a cluster's barrier, whose own order reaches no
             further than the block. Interpreted as nothing: writes are seen at once there.
await_previous, let_next_start   Programmatic dependent launch: a kernel starts while the one before it ends.
             Interpreted as nothing: kernels run one after another there.

On a GPU the real step runs; every substitute is rechecked there by the gates.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu.utils import inline_ptx
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting

_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
BLOCKS_OF_8 = (plgpu.TilingTransform((8, 64)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]
BLOCKS_OF_1 = (plgpu.TilingTransform((1, 64)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]


def panels(*lead: int, rows: int = 64) -> plgpu.RefUnion:
    """SMEM [*lead, rows, 64] bf16: panels of 64 columns for wgmma, filled by TMA from any row. See `views`.

    A panel of 64 columns with 128-byte rows has the same bytes in blocks of 8 rows and of one row, which is why D = 128
    takes two panels. This leans on RefUnion's members starting at the same address (checked on a GPU by the gates).
    """
    shape = (*lead, rows, 64)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, jnp.bfloat16, transforms=BLOCKS_OF_8),
        plgpu.SMEM(shape, jnp.bfloat16, transforms=BLOCKS_OF_1),
    )


def views(union) -> tuple:
    """(what wgmma and loads use, what TMA writes) of `panels`."""
    tile, landing = union
    return (tile, tile) if interpreting() else (tile, landing)


def overlaid(*members: Any) -> Any:
    """The same SMEM as each of `members`, for one use after another. Their rows 0, 1, .. must be the same bytes.

    Interpreted as separate buffers: the race detector does not tell one row of a union's members from another.
    """
    return list(members) if interpreting() else plgpu.RefUnion(*members)


def publish() -> None:
    """Make this thread's earlier writes to GMEM visible to the cluster, and later reads see the cluster's.

    Needed on both sides of a cluster barrier that hands GMEM from block to block.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def fence(_):
        inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue]


def await_previous() -> None:
    """In a kernel that may start before the one ahead of it in the stream ends: wait for its end and its writes."""
    if not interpreting():
        plgpu.griddepcontrol_wait()


def let_next_start() -> None:
    """Let the next kernel start, if it calls `await_previous`, once every block has come here or ended."""
    if not interpreting():
        plgpu.griddepcontrol_launch_dependents()
