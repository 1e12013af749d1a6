"""Shapes and dtypes without values. Signatures use jaxtyping: BFloat16[Array, "T D"] is T rows of D columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}


def spec(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype without a value: spec("bf16", 64, 256)."""
    return jax.ShapeDtypeStruct(shape, _DTYPES[dtype])
