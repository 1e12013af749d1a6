"""Regions in torch on CPU: the jitted reference, its operands and results passed by DLPack without a copy.

Results stay JAX arrays while only regions read them; compile.py asks for the torch view where torch needs one.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from bridges.torch_ops.dtypes import to_jax
from isojax import _jax_internals as internals
from isojax.lowering import jitted
from isojax.region import Region

ALIGN = 64  # bytes; XLA's CPU client copies a buffer that is aligned less, and a stale copy would be read later

_compiled: dict[Any, Callable[..., tuple[jax.Array, ...]]] = {}
_views: dict[int, tuple[Any, tuple[Any, ...], jax.Array]] = {}


def to_array(x: torch.Tensor) -> jax.Array:
    """JAX array over the memory of a contiguous CPU tensor; a misaligned one is copied.

    Raises: Refused for a dtype that JAX would change.
    """
    to_jax(x.dtype)
    # detach: the capsule must not own the caller's Python object, and JAX refuses a tensor that requires a gradient
    x = x.detach()
    if x.data_ptr() % ALIGN:
        x = x.clone()
    if 1 in x.shape:
        # an axis of size 1 may carry any stride in torch, and JAX would read another layout from it
        x = x.as_strided(x.shape, [math.prod(x.shape[i + 1 :]) for i in range(x.ndim)])
    return internals.array_of_capsule(torch._C._to_dlpack(x))


def to_array_cached(x: torch.Tensor) -> jax.Array:
    """to_array for a tensor that will come again (a weight, a cache): its view is kept as long as the tensor lives.

    A view aliases memory, so it cannot go stale; a copy could, so a misaligned tensor is copied each time.
    """
    hit = _views.get(id(x))
    memory = x.data_ptr(), x.shape, x.dtype
    if hit is not None and hit[0]() is x and hit[1] == memory:
        return hit[2]
    array = to_array(x)
    if not memory[0] % ALIGN:
        key = id(x)

        def forget(gone: Any) -> None:
            if key in _views and _views[key][0] is gone:  # the id may belong to another tensor by now
                del _views[key]

        _views[key] = (weakref.ref(x, forget), memory, array)
    return array


def to_tensor(a: jax.Array) -> torch.Tensor:
    """torch view of a CPU array that is ready; the tensor owns the memory from then on."""
    return torch._C._from_dlpack(internals.capsule_of_array(a))


def region_function(
    region: Region, avals: Sequence[Any], statics: Mapping[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """The compiled reference of one region call, JAX arrays to JAX arrays, ready when it returns.

    Compiled here, once per process for each (region, statics, avals). Raises: Unsupported.
    """
    key = (region, tuple(sorted(statics.items())), tuple((tuple(a.shape), str(a.dtype)) for a in avals))
    if key not in _compiled:
        region.check("cpu", avals, statics)
        here = jax.sharding.SingleDeviceSharding(internals.cpu_device())
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in avals]
        run = jitted(region, dict(statics)).lower(*specs).compile()

        def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            outs = run(*arrays)
            for o in outs:  # torch reads memory at once, and writes into it: nothing may still be running
                o.block_until_ready()
            return outs

        _compiled[key] = call
    return _compiled[key]
