"""A kept kernel on a device: its machine code loaded by the CUDA driver, its host code followed in Python.

The descriptors and the launch are made by Mosaic's own runtime library, as from the JIT-compiled host function.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isojax.aot import Binary
from isojax.errors import Unavailable
from isojax.host_code import Address

MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # CU_FUNC_ATTRIBUTE_*
PORTABLE_CLUSTER = 8  # blocks
DESCRIPTOR_ALIGN = 64  # bytes
_Pointers = Any  # a ctypes array of void pointers: the operands', then the results'


def load(binary: Binary) -> Callable[[int, _Pointers], None]:
    """(stream, pointers) -> launched, in the current context. Raises Unavailable where the driver refuses the code."""
    driver = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), binary.cubin), f"loading {binary.name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, binary.name.encode()), f"finding {binary.name}")
    blocks = binary.host.dims[3] * binary.host.dims[4] * binary.host.dims[5]
    if binary.host.smem:
        _check(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, binary.host.smem), "asking for shared memory")
    if blocks > PORTABLE_CLUSTER:
        _check(driver.cuFuncSetAttribute(function, NON_PORTABLE_CLUSTER, 1), "asking for a large cluster")
    return launcher(binary, function, _runtime())


def launcher(binary: Binary, function: Any, runtime: Any) -> Callable[[int, _Pointers], None]:
    """The host code of a kernel as a Python function."""
    host = binary.host
    space = ctypes.create_string_buffer(host.area + DESCRIPTOR_ALIGN)
    area = -(-ctypes.addressof(space) // DESCRIPTOR_ALIGN) * DESCRIPTOR_ALIGN
    words = lambda xs: (ctypes.c_int64 * len(xs))(*xs)
    made = [
        (
            ctypes.c_void_p(area + d.at),
            d.base.operand,
            d.base.offset,
            (d.element, len(d.sizes), words(d.sizes), words(d.strides), d.swizzle, words(d.window)),
        )
        for d in host.descriptors
    ]
    values = (ctypes.c_uint64 * len(host.params))()
    at = lambda i: ctypes.addressof(values) + 8 * i
    params = (ctypes.c_void_p * len(host.params))(
        *(at(i) if isinstance(p, Address) else area for i, p in enumerate(host.params))
    )
    addresses = [(i, p.operand, p.offset) for i, p in enumerate(host.params) if isinstance(p, Address)]
    encode, start = runtime.mosaic_gpu_init_tma_desc, runtime.mosaic_gpu_launch_kernel
    fixed = (*host.dims, host.smem, host.pdl)
    lock = threading.Lock()  # the area is read by the launch, so two threads may not fill it at once

    def launch(stream: int, pointers: _Pointers, _keep: Any = space) -> None:
        with lock:
            for to, operand, offset, rest in made:
                encode(to, pointers[operand] + offset, *rest)
            for i, operand, offset in addresses:
                values[i] = pointers[operand] + offset
            if result := start(function, *fixed, stream, params):
                raise Unavailable(f"launching {binary.name} failed: CUDA error {result}")

    return launch


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise Unavailable(f"launching kernels needs the NVIDIA driver: {e}") from e


@functools.cache
def _runtime() -> Any:
    import importlib.util

    spec = importlib.util.find_spec("jax_cuda13_plugin")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("launching kernels needs JAX's CUDA plug-in; install isojax[gpu]")
    runtime = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "libmosaic_gpu_runtime.so")))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    runtime.mosaic_gpu_init_tma_desc.argtypes = [pointer, pointer, long, long, pointer, pointer, long, pointer]
    runtime.mosaic_gpu_init_tma_desc.restype = None
    runtime.mosaic_gpu_launch_kernel.argtypes = [pointer, *[ctypes.c_uint32] * 10, ctypes.c_int32, pointer, pointer]
    runtime.mosaic_gpu_launch_kernel.restype = ctypes.c_int32
    return runtime


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise Unavailable(f"{what} failed: {(text.value or b'').decode() or result}")
