"""torch dtypes and tensors for JAX's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from isojax.errors import Refused

_TORCH = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_JAX = {t: jnp.dtype(name) for name, t in _TORCH.items()}


def to_torch(dtype: Any) -> torch.dtype:
    """torch dtype of a JAX dtype. Raises Refused for one that a Program may not hold (64-bit ones among them)."""
    name = jnp.dtype(dtype).name
    if name not in _TORCH:
        raise Refused(f"dtype {name} does not cross between JAX and torch; allowed: {', '.join(_TORCH)}")
    return _TORCH[name]


def to_jax(dtype: torch.dtype) -> np.dtype:
    """JAX dtype of a torch dtype. Raises Refused; int64 has to be narrowed first (compile_program does it, checked)."""
    if dtype not in _JAX:
        mend = "; narrow it to int32 with a range check first" if dtype is torch.int64 else ""
        raise Refused(f"{dtype} does not cross between torch and JAX{mend}; allowed: {', '.join(map(str, _JAX))}")
    return _JAX[dtype]


def tensor_of(value: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A torch copy of a small JAX or numpy array, bit for bit."""
    a = np.array(value, copy=True, order="C")
    raw = torch.from_numpy(a.reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(a.shape).to(device) if a.size else torch.empty(a.shape, dtype=dtype, device=device)
