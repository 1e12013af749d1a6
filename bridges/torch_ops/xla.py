"""Regions that declare XLA in place of a kernel on sm90 (`kind="xla"`), in torch: jax.jit on JAX's CUDA backend.

Slow (a quarter of a millisecond a call) and never captured; it exists so that backward references run where their
kernels are not written yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from isojax.errors import Unavailable
from isojax.lowering import jitted
from isojax.region import Region

_compiled: dict[Any, Any] = {}


def region_function(
    region: Region, avals: Sequence[Any], statics: Mapping[str, Any], device: torch.device
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The XLA stand-in of one region call, over contiguous CUDA tensors.

    Raises: Unsupported; Unavailable if JAX has no CUDA backend in this process, or (called) during graph capture.
    """
    key = (region, device, tuple(sorted(statics.items())), tuple((tuple(a.shape), str(a.dtype)) for a in avals))
    if key not in _compiled:
        region.check("sm90", avals, statics)
        here = jax.sharding.SingleDeviceSharding(_jax_device(region.name, device))
        specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here) for a in avals]
        _compiled[key] = jitted(region, dict(statics)).lower(*specs).compile()
    run, name = _compiled[key], region.name

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.cuda.is_current_stream_capturing():
            raise Unavailable(f"region {name} runs through XLA on sm90, which a CUDA graph cannot capture")
        # Importing makes XLA wait for torch's current stream, exporting makes that stream wait for XLA. `tensors` and
        # `arrays` live until then, so torch cannot hand their memory out too early.
        arrays = [jax.dlpack.from_dlpack(t.detach()) for t in tensors]
        outs = run(*arrays)
        return tuple(torch.from_dlpack(o) for o in outs)

    return call


def _jax_device(name: str, device: torch.device) -> Any:
    try:
        found = jax.local_devices(backend="cuda")
    except RuntimeError as e:
        raise Unavailable(
            f"region {name} runs through XLA on sm90, and JAX has no CUDA backend in this process; start it with "
            "JAX_PLATFORMS=cuda,cpu and XLA_PYTHON_CLIENT_PREALLOCATE=false"
        ) from e
    for d in found:
        if d.local_hardware_id == device.index:
            return d
    raise Unavailable(f"region {name}: JAX does not see {device}; it sees {found}")
