"""What differs between arches when a Program runs in torch: how a region is called, and what its operands are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bridges.torch_ops import cpu
from isojax.errors import Unavailable
from isojax.region import Region


class Backend(Protocol):
    """enter: torch tensor -> region operand. leave: region result -> torch tensor. converts: whether they differ."""

    device: torch.device
    converts: bool

    def region(self, region: Region, avals: Sequence[Any], statics: Mapping[str, Any]) -> Callable[..., Any]: ...
    def enter(self, x: torch.Tensor) -> Any: ...
    def enter_input(self, x: torch.Tensor) -> Any: ...
    def leave(self, a: Any) -> torch.Tensor: ...


class Cpu:
    """Regions are jitted references over JAX arrays. `strided` is called for each operand that has to be copied."""

    converts = True

    def __init__(self, device: torch.device, strided: Callable[[], None]):
        self.device, self._strided = device, strided

    def region(self, region: Region, avals: Sequence[Any], statics: Mapping[str, Any]) -> Callable[..., Any]:
        return cpu.region_function(region, avals, statics)

    def enter(self, x: torch.Tensor) -> Any:
        if not x.is_contiguous():
            self._strided()
            x = x.contiguous()
        return cpu.to_array(x)

    def enter_input(self, x: torch.Tensor) -> Any:
        return cpu.to_array_cached(x) if x.is_contiguous() else self.enter(x)

    def leave(self, a: Any) -> torch.Tensor:
        return cpu.to_tensor(a)


class Cuda:
    """Regions are launched kernels over contiguous tensors (or, where declared, XLA through DLPack)."""

    converts = False

    def __init__(self, device: torch.device, strided: Callable[[], None]):
        self.device, self._strided = device, strided

    def region(self, region: Region, avals: Sequence[Any], statics: Mapping[str, Any]) -> Callable[..., Any]:
        from bridges.torch_ops import cuda, xla

        kind = region.implementation("sm90").kind
        make = cuda.region_function if kind == "kernel" else xla.region_function
        return make(region, avals, statics, self.device)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_contiguous():
            return x
        self._strided()
        return x.contiguous()

    enter_input = enter

    def leave(self, a: torch.Tensor) -> torch.Tensor:
        return a


def make(arch: str, device: torch.device, strided: Callable[[], None]) -> Backend:
    """The backend of an arch. Raises Unavailable for an unknown one."""
    kinds = {"cpu": Cpu, "sm90": Cuda}
    if arch not in kinds:
        raise Unavailable(f"arch {arch!r} is unknown; known are {', '.join(kinds)}")
    return kinds[arch](device, strided)


def resolve(arch: str, device: torch.device | str | None) -> torch.device:
    """The device that an arch runs on: as given, or the CPU, or the current CUDA device.

    Raises: Unavailable for a device of another kind, or where there is no Hopper GPU.
    """
    where = torch.device(device) if device is not None else torch.device("cpu" if arch == "cpu" else "cuda")
    if where.type != ("cpu" if arch == "cpu" else "cuda"):
        raise Unavailable(f"arch {arch!r} does not run on {where}; cpu runs on 'cpu', sm90 on 'cuda'")
    if where.type == "cpu":
        return where
    if not torch.cuda.is_available():
        raise Unavailable("arch 'sm90' was asked for, but torch sees no CUDA device here; use arch='cpu'")
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    if torch.cuda.get_device_capability(where) != (9, 0):
        raise Unavailable(f"arch 'sm90' needs a Hopper GPU; {where} is {torch.cuda.get_device_name(where)}")
    return where
