"""Regions in torch on CUDA: launch a region's Mosaic kernels on torch's current stream.

A launch is one cuLaunchKernelEx with its TMA descriptors passed by value: no allocation outside torch, no copy, no
wait. So it may be captured in a CUDA graph and replayed with other contents in the same buffers. Compiling loads a CUDA
module, which may not happen during capture: launchers are built before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bridges.torch_ops import driver
from bridges.torch_ops.dtypes import tensor_of, to_torch
from isojax import precompile
from isojax.aot import Binary
from isojax.errors import InputError, Unavailable, Unsupported
from isojax.kernel_plan import Allocate, Constant, Copy, Fill, KernelPlan, Launch, View, kernel_plan
from isojax.lowering import canonical_asm
from isojax.region import Region

TMA_ALIGN = 16  # bytes; a TMA descriptor over a pointer aligned less cannot be made, and the runtime would abort

Kernel = Callable[[int, Any], None]  # (CUDA stream, array of device pointers) -> launched
_kernels: dict[tuple[int, str], Kernel] = {}
_launchers: dict[Any, Launcher] = {}


def region_function(region: Region, avals: Sequence[Any], statics: Mapping[str, Any], device: torch.device) -> Launcher:
    """The launcher of one region call on one device, built once per process.

    Raises: Unsupported; Unavailable without the CUDA plug-in, or when it is not built yet while a graph is captured.
    """
    key = _key(region, avals, statics, device)
    if key not in _launchers:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in avals)
            raise Unavailable(
                f"region {region.name} on {shapes} is not compiled yet, and that cannot be done while a CUDA graph is "
                "captured; run the same shapes once before the capture"
            )
        _launchers[key] = Launcher(kernel_plan(region, avals, dict(statics)), device)
    return _launchers[key]


def _key(region: Region, avals: Sequence[Any], statics: Mapping[str, Any], device: torch.device) -> Any:
    return region, device, tuple(sorted(statics.items())), tuple((tuple(a.shape), str(a.dtype)) for a in avals)


def prepare(calls: Sequence[tuple[Region, Sequence[Any], Mapping[str, Any]]], device: torch.device) -> None:
    """Build the launchers of many region calls at once, from kept files where there are any (isojax.precompile).

    What cannot be kept is left to region_function. Tuning and gates do not come here: they compile what they look at.
    With ISOJAX_KEEP=0 in the environment nothing is kept or read: every kernel is compiled where it is launched.
    """
    if os.environ.get("ISOJAX_KEEP") == "0":
        return
    wanted = {}
    for region, avals, statics in calls:
        key = _key(region, avals, statics, device)
        if key not in _launchers and precompile.keepable(region):
            region.check("sm90", avals, statics)
            wanted[key] = precompile.Call.of(region, avals, statics)
    now = precompile.state()
    failed = precompile.ahead(wanted.values(), now)
    for key, call in wanted.items():
        if call not in failed and (plan := precompile.kept(call, now)) is not None:
            _launchers[key] = Launcher(plan, device)


class Launcher:
    """A region call as a function of contiguous CUDA tensors of fixed shapes; returns the tuple of all its outputs.

    Every operand's shape, dtype, device, contiguity and 16-byte alignment is checked before anything is launched, since
    the runtime aborts the process on a mistake. Outputs and scratch come from torch's allocator.
    """

    def __init__(
        self,
        plan: KernelPlan,
        device: torch.device,
        *,
        load: Callable[[Any, torch.device], Kernel] | None = None,
        stream: Callable[[int], int] | None = None,
    ):
        self.plan, self.device = plan, device
        empty = [b.shape for b in plan.buffers if 0 in b.shape]
        if empty:
            raise Unsupported(
                plan.region, f"an empty buffer {empty[0]}", "at least one element", "pad, or skip the call"
            )
        index = device.index if device.type == "cuda" else -1
        self._globals: dict[str, Any] = {
            "device": device,
            "stream_of": stream or torch._C._cuda_getCurrentRawStream,
            "current_device": torch._C._cuda_getDevice if device.type == "cuda" else (lambda: -1),
            "refuse": self._refuse,
            "elsewhere": self._elsewhere,
            "empty": torch.empty,
            "full": torch.full,
            "zeros": torch.zeros,
        }
        self.source = _source(plan, index, device, load or load_kernel, self._globals)
        exec(compile(self.source, f"<launcher of {plan.region}>", "exec"), self._globals)
        self._launch = self._globals["launch"]

    def __call__(self, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._launch(*operands)

    def _refuse(self, i: int, x: torch.Tensor) -> None:
        b = self.plan.buffers[i]
        raise InputError(
            f"region {self.plan.region}, operand {i}: given {x.dtype} {tuple(x.shape)} on {x.device}, strides "
            f"{x.stride()}, address {x.data_ptr():#x}; compiled for contiguous {b.dtype} {b.shape} on {self.device}, "
            f"aligned to {TMA_ALIGN} bytes"
        )

    def _elsewhere(self) -> None:
        raise Unavailable(
            f"region {self.plan.region} is compiled for {self.device}, which is not the current device; "
            f"call it under torch.cuda.device({self.device.index})"
        )


def _source(plan: KernelPlan, index: int, device: torch.device, load: Any, scope: dict[str, Any]) -> str:
    """Straight-line Python: b<i> is the tensor of value i, p<i> its address."""
    lines = [f"if current_device() != {index}: elsewhere()"]
    tensors = set(range(plan.arguments))
    views = {op.out: op for op in plan.ops if isinstance(op, View)}
    for i, b in enumerate(plan.buffers):
        scope[f"s{i}"], scope[f"d{i}"] = b.shape, to_torch(b.dtype)
    for i in range(plan.arguments):
        wrong = f"b{i}.dtype is not d{i} or b{i}.shape != s{i} or b{i}.get_device() != {index}"
        lines.append(f"p{i} = b{i}.data_ptr()")
        lines.append(f"if {wrong} or not b{i}.is_contiguous() or p{i} & {TMA_ALIGN - 1}: refuse({i}, b{i})")

    def made(i: int, text: str) -> None:
        lines.append(f"b{i} = {text}")
        lines.append(f"p{i} = b{i}.data_ptr()")
        tensors.add(i)

    def tensor(i: int) -> str:
        if i not in tensors:
            op = views[i]
            size = scope[f"d{i}"].itemsize
            start, n = op.offset // size, torch.Size(scope[f"s{i}"]).numel()
            part = "" if torch.Size(scope[f"s{op.source}"]).numel() == n else f".view(-1)[{start}:{start + n}]"
            lines.append(f"b{i} = {tensor(op.source)}{part}.view(s{i})")
            tensors.add(i)
        return f"b{i}"

    lines.append(f"stream = stream_of({index})")
    allocate = lambda i: made(i, f"empty(s{i}, dtype=d{i}, device=device)")
    for k, op in enumerate(plan.ops):
        if isinstance(op, Allocate):
            allocate(op.out)
        elif isinstance(op, View):
            lines.append(f"p{op.out} = p{op.source}" + (f" + {op.offset}" if op.offset else ""))
        elif isinstance(op, Copy):
            made(op.out, f"{tensor(op.source)}.clone()")
        elif isinstance(op, Fill) and op.fresh:
            o = op.out
            text = f"zeros(s{o}, " if op.value == 0 else f"full(s{o}, {op.value!r}, "
            made(o, f"{text}dtype=d{o}, device=device)")
        elif isinstance(op, Fill | Constant):
            o = op.out
            if isinstance(op, Fill):
                value = torch.full(scope[f"s{o}"], op.value, dtype=scope[f"d{o}"], device=device)
            else:
                value = tensor_of(op.data, scope[f"d{o}"], device)
            scope[f"k{o}"] = value
            if isinstance(op, Constant) and op.fresh:
                made(o, f"k{o}.clone()")
            else:
                scope[f"b{o}"], scope[f"p{o}"] = value, value.data_ptr()
                tensors.add(o)
        elif isinstance(op, Launch):
            alias = {out: op.operands[i] for out, i in op.aliases}
            for j, o in enumerate(op.outs):
                if j in alias:
                    lines += [f"b{o} = {tensor(alias[j])}", f"p{o} = p{alias[j]}"]
                    tensors.add(o)
                else:
                    allocate(o)
            pointers = ", ".join(f"p{i}" for i in (*op.operands, *op.outs))
            scope[f"f{k}"] = load(op.module, device)
            scope[f"a{k}"] = ctypes.c_void_p * (len(op.operands) + len(op.outs))
            lines.append(f"f{k}(stream, a{k}({pointers}))")
    outputs = "".join(f"{tensor(i)}, " for i in plan.returns)
    head = f"def launch({', '.join(f'b{i}' for i in range(plan.arguments))}):"
    return "\n    ".join([head, *lines, f"return ({outputs})"]) + "\n"


def load_kernel(module: bytes | Binary, device: torch.device) -> Kernel:
    """Compile and load one Mosaic module on a device, or load its kept code; each is loaded once per process.

    Raises: Unavailable without the CUDA plug-in, or where the compiler fails.
    """
    kept = isinstance(module, Binary)
    digest = hashlib.sha256(repr(module).encode() if kept else canonical_asm(module).encode()).hexdigest()
    key = (device.index, digest)
    if key not in _kernels:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the device's primary context current
            if kept:
                _kernels[key] = driver.load(module)
                return _kernels[key]
            handle = _plugin().MosaicGpuCompile(module, len(module))
        if not handle:
            raise Unavailable("MosaicGpuCompile failed; is nvidia-cuda-nvcc installed, and the driver for CUDA 13?")
        _kernels[key] = _checked(ctypes.c_void_p(handle[0]), _LAUNCH(handle[1]))
    return _kernels[key]


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def _checked(function: Any, host_launch: Callable[[Any, int, Any], int]) -> Kernel:
    """A kernel by its host function, which returns cuLaunchKernelEx's result."""

    def launch(stream: int, pointers: Any) -> None:
        if result := host_launch(function, stream, pointers):
            raise Unavailable(f"launching a kernel failed: CUDA error {result}")

    return launch


@functools.cache
def _plugin() -> Any:
    try:
        import jax_plugins.xla_cuda13 as plugin  # type: ignore[import-not-found]
    except ImportError as e:
        raise Unavailable("launching kernels needs JAX's CUDA plug-in; install isojax[gpu]") from e
    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    return library
