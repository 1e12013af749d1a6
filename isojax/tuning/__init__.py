"""Measured choices, per device kind: they change speed, never bits.

A table (a JSON file beside this module) says which tiles were fastest for a region at one shape and row count.
`isojax tune` writes it, after a gate for every entry. A kernel asks `choose`; where the table of this machine's GPU has
no entry for exactly that shape, the kernel's own rule decides. Contracts hash what `defaults()` lowers, so that a table
never moves an identity.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.tuning.table import Table, load

FOLDER = Path(__file__).parent

# What `choose` answers in this context in place of the table: (tiles,), or (None,) for the kernel's own rule.
_answer: ContextVar[tuple[Tiles | None] | None] = ContextVar("answer", default=None)


def choose(region: str, rows: int, shape: Mapping[str, int], rule: Callable[[], Tiles]) -> Tiles:
    """Tiles of one region call, when it is traced. rule: the kernel's own choice."""
    answer = _answer.get()
    if answer is not None:
        return answer[0] or rule()
    table = active()
    return (table and table.find(region, rows, shape)) or rule()


@contextmanager
def defaults() -> Iterator[None]:
    """No table counts in this context: what contracts hash, and what candidates are compared with."""
    token = _answer.set((None,))
    try:
        yield
    finally:
        _answer.reset(token)


@contextmanager
def forced(tiles: Tiles) -> Iterator[None]:
    """Every call that is traced in this context takes these tiles."""
    token = _answer.set((tiles,))
    try:
        yield
    finally:
        _answer.reset(token)


def path(device: str) -> Path:
    """Where the table of a device kind lies: 'NVIDIA H200' -> nvidia_h200.json."""
    return FOLDER / f"{device.lower().replace(' ', '_')}.json"


@functools.cache
def active() -> Table | None:
    """The shipped table of this machine's GPUs, or None. Raises TableError where it is not valid."""
    device = installed()
    if device is None or not path(device).exists():
        return None
    return load(path(device), device)


def digest() -> str:
    """What of this module goes into the key of a kept kernel: the active table, or ''."""
    table = active()
    return "" if table is None else table.digest


@functools.cache
def installed() -> str | None:
    """Name of this machine's GPUs, or None where there are none, or of several kinds.

    Asked of the driver's management library, which needs no CUDA context and may be asked before a fork.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        names = set()
        for i in range(count.value):
            handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if nvml.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)) != 0:
                return None
            if nvml.nvmlDeviceGetName(handle, name, 96) != 0:
                return None
            names.add(name.value.decode())
        return names.pop() if len(names) == 1 else None
    finally:
        nvml.nvmlShutdown()
