"""Speed of a region's kernel against a native peer and against the floor, all measured in one run.

A region's maker, registered with `@region.bench_cases`, is `fn() -> list[BenchCase]`. The floor of a case is the
larger of its bytes over the copy bandwidth and its flops over the matmul rate, both measured on the same device.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isojax import region as regions
from isojax.errors import RegionError, Unavailable

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}
FLUSH_BYTES = 1 << 29  # written before each timing: empties the L2, and hides the host's launch time behind it
REPEATS = 30


class Operand(NamedTuple):
    """One operand: drawn at random (floats normal times `scale`, integers below `high`), or `values` as given."""

    dtype: str
    shape: tuple[int, ...]
    high: int = 1
    scale: float = 1.0
    values: Any = None

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, _DTYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def tensor(self, torch: Any, device: Any) -> Any:
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}[self.dtype]
        if self.values is not None:
            return torch.as_tensor(self.values, dtype=dtype, device=device).reshape(self.shape)
        if self.dtype == "i32":
            return torch.randint(self.high, self.shape, dtype=dtype, device=device)
        return (torch.randn(self.shape, dtype=torch.float32, device=device) * self.scale).to(dtype)


@dataclass(frozen=True)
class BenchCase:
    """One shape.

    operands: Operand, or None where absent.
    peer: given torch and the tensors, returns the native operation as a callable without arguments; what it may prepare
      (weights in its own layout, compilation) is outside the timing. None where there is no peer.
    bytes: what has to move at least, each operand and output once. flops: multiply-adds times two.
    """

    name: str
    operands: tuple[Operand | None, ...]
    bytes: int
    flops: int = 0
    statics: Mapping[str, Any] = field(default_factory=dict)
    peer: Callable[..., Callable[[], Any]] | None = None


@dataclass(frozen=True)
class BenchResult:
    """Medians in microseconds. speedup: peer time over ours. efficiency: floor over ours."""

    name: str
    us: float
    floor_us: float
    peer_us: float | None

    @property
    def speedup(self) -> float | None:
        return None if self.peer_us is None else self.peer_us / self.us

    @property
    def efficiency(self) -> float:
        return self.floor_us / self.us


# launch(region, avals, statics) -> callable on torch tensors (absent operands left out), returning all outputs
Launch = Callable[[regions.Region, Sequence[Any], Mapping[str, Any]], Callable[..., Any]]


def timer(torch: Any, device: Any) -> Callable[[Callable[[], Any]], float]:
    """A function that gives the median time of a callable in microseconds, by CUDA events, with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def measure(fn: Callable[[], Any]) -> float:
        for _ in range(3):
            fn()
        pairs = []
        for _ in range(REPEATS):
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            fn()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize(device)
        return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3

    return measure


def rates(torch: Any, device: Any, measure: Callable[[Callable[[], Any]], float]) -> tuple[float, float]:
    """(bytes per us of a device copy, bf16 flops per us of torch.mm), the best that this device shows."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / measure(lambda: target.copy_(source))
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * n**3 / measure(lambda: torch.mm(a, b))


def run_bench(name: str, device: Any, launch: Launch, match: str = "") -> list[BenchResult]:
    """Measure the cases of a region whose names match the regular expression `match`, on a CUDA device.

    Raises: RegionError where the region is unknown or has no bench entry, Unavailable without CUDA.
    """
    import torch

    region = regions.lookup(name)
    if region.bench is None:
        raise RegionError(f"region {name} has no bench entry; define one with @region.bench_cases")
    if not torch.cuda.is_available():
        raise Unavailable("benchmarks need a CUDA device")
    measure = timer(torch, device)
    bandwidth, flop_rate = rates(torch, device, measure)
    results = []
    for case in (c for c in region.bench() if re.search(match, c.name)):
        tensors = [None if o is None else o.tensor(torch, device) for o in case.operands]
        avals, statics = region.bind(tuple(None if o is None else o.aval for o in case.operands), dict(case.statics))
        run, present = launch(region, avals, statics), [t for t in tensors if t is not None]
        ours = measure(lambda run=run, present=present: run(*present))
        peer = None if case.peer is None else measure(case.peer(torch, *tensors))
        floor = max(case.bytes / bandwidth, case.flops / flop_rate)
        results.append(BenchResult(f"{name}/{case.name}", ours, floor, peer))
    return results
