"""Steps that Mosaic's GPU interpreter cannot run, each with its substitute. This is the whole list.

accumulate   wgmma whose left operand is in registers; interpreted as a dot product of values.

On a GPU the real step runs; every substitute is rechecked there by the gates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from isojax._jax_internals import interpreting


def accumulate(acc: jax.Array, a: jax.Array, b) -> jax.Array:
    """acc + a @ b on one warpgroup. acc [64, N] fp32 and a [64, K] bf16 in registers, b [K, N] bf16 in SMEM.

    The wgmma has finished when this returns.
    """
    if interpreting():
        return acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def scope(ref):
        plgpu.wgmma(ref, a, b)

    return pl.run_state(scope)(plgpu.ACC.init(acc))
