"""Steps that Mosaic's GPU interpreter cannot run, each with its substitute. This is the whole list.

accumulate   wgmma whose left operand is in registers; interpreted as a dot product of values.
landing      TMA from any row of GMEM into a tile that wgmma reads: Mosaic cuts such a tile, and with it the TMA box,
             into blocks of 8 rows, whose GMEM offset must be a multiple of 8. A second view of the same bytes has
             blocks of one row. Interpreted as a copy into the tile itself (views are separate buffers there).

On a GPU the real step runs; every substitute is rechecked there by the gates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting

_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
_BLOCKS_OF_8 = (plgpu.TilingTransform((8, 64)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]
_BLOCKS_OF_1 = (plgpu.TilingTransform((1, 64)), _SWIZZLE)  # pyright: ignore[reportAbstractUsage]


def panels(*lead: int) -> plgpu.RefUnion:
    """SMEM [*lead, 64, 64] bf16: panels of 64 columns for wgmma, filled by TMA from any row. See `views`.

    A panel of 64 x 64 with 128-byte rows has the same bytes in blocks of 8 rows and of one row, which is why D = 128
    takes two panels. This leans on RefUnion's members starting at the same address (checked on a GPU by the gates).
    """
    shape = (*lead, 64, 64)
    return plgpu.RefUnion(
        plgpu.SMEM(shape, jnp.bfloat16, transforms=_BLOCKS_OF_8),
        plgpu.SMEM(shape, jnp.bfloat16, transforms=_BLOCKS_OF_1),
    )


def views(union) -> tuple:
    """(what wgmma and loads use, what TMA writes) of `panels`."""
    tile, landing = union
    return (tile, tile) if interpreting() else (tile, landing)


def accumulate(acc: jax.Array, a: jax.Array, b, at: tuple = ()) -> jax.Array:
    """acc + a @ b[at] on one warpgroup. acc [64, N] fp32 and a [64, K] bf16 in registers, b[at] [K, N] bf16 in SMEM.

    The wgmma has finished when this returns.
    """
    if interpreting():
        value = b[at]
        plgpu.commit_smem()  # this read, unlike the wgmma's, is not ordered before a later copy into b
        return acc + jnp.dot(a, value, preferred_element_type=jnp.float32)

    def scope(ref):
        plgpu.wgmma(ref, a, b.at[at])  # indexed in here: run_state would carry the index as a value

    done = pl.run_state(scope)(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]
    return done  # pyright: ignore[reportReturnType]
