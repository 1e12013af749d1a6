"""a b + c rounded once, said so: mul.f32 and add.f32 are contracted to it or not, as the code around them has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import math

from isojax._jax_internals import interpreting
from isojax.pallas_kernels.warpgroup import registers as reg


def fma(a: jax.Array, b: jax.Array, c: jax.Array, layout: Any) -> jax.Array:
    """a b + c of three fp32 values of one shape and layout. Interpreted as a product and a sum."""
    if interpreting():
        return a * b + c
    out: Any = plgpu.ShapeDtypeStruct(a.shape, jnp.float32, layout=layout)

    @reg.inline(arg_types=(layout,) * 3, return_type=out)
    def run(_, x, y, z):
        registers = np.empty_like(x.registers)
        for at in np.ndindex(*registers.shape):
            registers[at] = math.fma(x.registers[at], y.registers[at], z.registers[at])
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return run(a, b, c)
