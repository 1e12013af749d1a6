"""Steps that Mosaic's GPU interpreter cannot run, each with its substitute. The others are those of `warpgroup`.

landing      TMA from any row of GMEM into a tile that wgmma reads: Mosaic cuts such a tile, and with it the TMA box,
             into blocks of 8 rows, whose GMEM offset must be a multiple of 8. A second view of the same bytes has
             blocks of one row. Interpreted as a copy into the tile itself (views are separate buffers there).
publish      A fence between a block's writes to GMEM and its arrival at a cluster's barrier, whose own order reaches no
             further than the block. Interpreted as nothing: writes are seen at once there.

On a GPU the real step runs; every substitute is rechecked there by the gates.
"""

from __future__ import annotations

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
