"""Shape-and-dtype names for signatures: BF16["T D"] is a bfloat16 array of T rows and D columns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32


_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}


def spec(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype without a value: spec("bf16", 64, 256)."""
    return jax.ShapeDtypeStruct(shape, _DTYPES[dtype])


class _Of:
    def __init__(self, kind):
        self.kind = kind

    def __getitem__(self, shape: str):
        return self.kind[Array, shape]


BF16 = _Of(BFloat16)
F32 = _Of(Float32)
I32 = _Of(Int32)
Real = _Of(Float)  # bfloat16 on sm90; the cpu arch takes float32 too

__all__ = ["BF16", "F32", "I32", "Real", "spec"]
