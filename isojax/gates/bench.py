"""Speed of a region's kernel against a native peer and against the floor, all measured in one run.

A region's maker, registered with `@region.bench_cases`, is `fn() -> list[BenchCase]`; the models' shapes come from
isojax.gates.shapes. The floor of a case is the larger of its bytes over the copy bandwidth and its flops over the
matmul rate, both measured on the same device. `isojax bench kernels` runs all of them (isojax.bench).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from isojax import region as regions
from isojax.errors import RegionError, Unavailable

_DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}
# Read before each timing: it empties the L2, and hides the host's launch time behind it. Not written: the timed kernel
# would pay for writing back an L2 full of dirty lines (measured on an H200: 22.7 us where 17.6 us are its own).
FLUSH_BYTES = 1 << 29
REPEATS = 30
LONG_US, LONG_REPEATS = 10_000, 10  # what runs this long is timed less often
FAR = 0.02  # relative L2 distance from the peer at which a kernel counts as wrong; bf16 peers come within 0.005


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
        return torch.randn(self.shape, dtype=dtype, device=device).mul_(self.scale)


class Peer(NamedTuple):
    """What a peer's maker returns where its name is not the case's `against`: which library was found, say."""

    name: str
    run: Callable[[], Any]

    def __call__(self) -> Any:
        return self.run()


@dataclass(frozen=True)
class BenchCase:
    """One shape.

    name: unique within the region, and holds model, part and `at` for people, as in "Qwen3-8B qkv M1024".
    operands: Operand, or None where absent.
    peer: given torch and the tensors, returns the native operation as a callable without arguments (or a Peer); what it
      may prepare (weights in its own layout, compilation) is outside the timing. None where there is no peer.
    against: what the peer is, for people.
    bytes: what has to move at least, each operand and output once. flops: multiply-adds times two.
    model, part, at: where the case stands in tables, plots and bars (isojax.bench.bars): "Qwen3-8B", "qkv", and one of
      {"M": 1024} (rows of a batch), {"length": 4096} (causal attention), {"sequences": 64, "context": 2048} (decode).
    comparable: the peer's outputs are ours in order and layout (ours may have more outputs, and rows of padding), so
      that the two are compared before they are timed.
    """

    name: str
    operands: tuple[Operand | None, ...]
    bytes: int
    flops: int = 0
    statics: Mapping[str, Any] = field(default_factory=dict)
    peer: Callable[..., Callable[[], Any] | Peer] | None = None
    against: str = "torch"
    model: str = ""
    part: str = ""
    at: Mapping[str, int] = field(default_factory=dict)
    comparable: bool = True

    def __post_init__(self) -> None:
        """Raises RegionError for sizes from which no floor and no place in a plot follows."""
        if self.bytes < 1 or self.flops < 0 or any(n < 1 for n in self.at.values()):
            given = f"bytes={self.bytes}, flops={self.flops}, at={dict(self.at)}"
            raise RegionError(f"bench case {self.name!r}: given {given}; give bytes and what is in `at` as at least 1")

    def bound(self, region: regions.Region) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Avals of the present operands, and statics, as `region.bind` gives them."""
        return region.bind(tuple(None if o is None else o.aval for o in self.operands), dict(self.statics))


class Timing(NamedTuple):
    """us: median. spread: interquartile range over the median. ratio: of what was timed in turns with it, the median
    over the rounds of the first one's time over this one's own; clocks change between rounds, hardly within one."""

    us: float
    spread: float
    repeats: int
    ratio: float


@dataclass(frozen=True)
class BenchResult:
    """Times in microseconds. peer: None where there is none. bytes_us, flops_us: the two floors.

    memory: peak bytes beyond the operands, outputs included. distance: of ours from the peer's outputs, relative L2.
    copy: of a device copy that moves as many bytes, where the case has no flops; a small one is far from the bandwidth
    of a large one, from which bytes_us comes.
    """

    name: str
    ours: Timing
    peer: Timing | None
    bytes_us: float
    flops_us: float
    memory: int = 0
    peer_memory: int | None = None
    distance: float | None = None
    against: str = ""
    copy: Timing | None = None

    @property
    def us(self) -> float:
        return self.ours.us

    @property
    def peer_us(self) -> float | None:
        return None if self.peer is None else self.peer.us

    @property
    def floor_us(self) -> float:
        return max(self.bytes_us, self.flops_us)

    @property
    def speedup(self) -> float | None:
        """The peer's time over ours, by rounds."""
        return None if self.peer is None else 1 / self.peer.ratio

    @property
    def efficiency(self) -> float:
        return self.floor_us / self.us


class FarFromPeer(RegionError):
    """The kernel's outputs are not what its peer computes: its time means nothing."""


class Empty(RegionError):
    """The kernel's outputs, which no peer's are compared with, are what one leaves that computes nothing."""


class Stopwatch:
    """Median times of callables by CUDA events, each call with a cold L2.

    Raises: Unavailable without CUDA, or where the flush could not empty the L2.
    """

    def __init__(self, torch: Any, device: Any):
        if not torch.cuda.is_available():
            raise Unavailable("benchmarks need a CUDA device")
        self.torch, self.device = torch, device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        if not 0 < 4 * l2 <= FLUSH_BYTES:
            raise Unavailable(f"an L2 of {l2} bytes needs a larger flush than {FLUSH_BYTES} (isojax.gates.bench)")
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)

    def __call__(self, fn: Callable[[], Any]) -> float:
        return self.among(fn)[0].us

    def among(self, *fns: Callable[[], Any]) -> list[Timing]:
        """Times of several callables, in turns, so that clocks and neighbours are the same for all."""
        for _ in range(3):
            pairs = [self._event(fn) for fn in fns]
        self.torch.cuda.synchronize(self.device)
        slowest = max(a.elapsed_time(b) for a, b in pairs) * 1e3
        repeats = LONG_REPEATS if slowest > LONG_US else REPEATS
        rounds = [[self._event(fn) for fn in fns] for _ in range(repeats)]
        self.torch.cuda.synchronize(self.device)
        return by_rounds([[a.elapsed_time(b) * 1e3 for a, b in pairs] for pairs in rounds])

    def _event(self, fn: Callable[[], Any]) -> tuple[Any, Any]:
        self.flush.amax()
        start, stop = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        stop.record()
        return start, stop

    def memory(self, fn: Callable[[], Any]) -> tuple[int, Any]:
        """(peak bytes that one call allocates beyond what is there, its result)."""
        cuda = self.torch.cuda
        cuda.synchronize(self.device)
        cuda.reset_peak_memory_stats(self.device)
        before = cuda.memory_allocated(self.device)
        out = fn()
        cuda.synchronize(self.device)
        return cuda.max_memory_allocated(self.device) - before, out


def by_rounds(rounds: Sequence[Sequence[float]]) -> list[Timing]:
    """Of each of several things the timing, from at least two rounds of times in which each was timed once."""
    out = []
    for column in zip(*rounds, strict=True):
        low, middle, high = statistics.quantiles(column, n=4, method="inclusive")
        ratio = statistics.median(r[0] / own for r, own in zip(rounds, column, strict=True))
        out.append(Timing(middle, (high - low) / middle, len(rounds), ratio))
    return out


def rates(torch: Any, device: Any, measure: Callable[[Callable[[], Any]], float]) -> tuple[float, float]:
    """(bytes per us of a device copy, bf16 flops per us of torch.mm), the best that this device shows."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copied = 2 * source.numel() / measure(lambda: target.copy_(source))
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return copied, 2 * n**3 / measure(lambda: torch.mm(a, b))


def copier(torch: Any, device: Any, moved: int) -> Callable[[], Any]:
    """A device copy that moves that many bytes, read and written ones together."""
    source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def distance(torch: Any, ours: Any, peer: Any) -> float:
    """Largest relative L2 distance of the peer's outputs from ours; ours may have further outputs and rows.

    Raises: RegionError where shapes do not correspond.
    """
    worst, norm = 0.0, torch.linalg.vector_norm
    theirs = peer if isinstance(peer, (tuple, list)) else (peer,)
    if not 0 < len(theirs) <= len(ours):
        raise RegionError(f"the peer has {len(theirs)} outputs, ours {len(ours)}; set comparable=False in its case")
    for o, p in zip(ours, theirs, strict=False):
        if o.numel() != p.numel():
            if o.shape[1:] != p.shape[1:] or len(o) < len(p):
                shapes = f"{tuple(o.shape)}, the peer's {tuple(p.shape)}"
                raise RegionError(f"an output has shape {shapes}; set comparable=False in its case")
            o = o[: len(p)]
        o, p = o.float().flatten(), p.float().flatten()
        gap = float(norm(o - p) / norm(p))
        worst = max(worst, gap if gap == gap else float("inf"))  # a NaN is far from anything
    return worst


def emptiness(torch: Any, outputs: Sequence[Any]) -> str:
    """What says that a kernel did not do its work on random operands, or ''."""
    for i, o in enumerate(outputs):
        if bool(torch.isnan(o).any()):
            return f"output {i} holds NaN"
        if not bool(o.any()):
            return f"output {i} is all zero"
    return ""


def measure_case(
    region: regions.Region, case: BenchCase, run: Callable[..., Any], watch: Stopwatch, bandwidth: float, flops: float
) -> BenchResult:
    """Compare one case with its peer and time both. run: launches the region on its present operands.

    Raises: FarFromPeer where the kernel computes something else than its peer; Empty where there is nothing to compare
    it with, and an output holds NaN or only zeros.
    """
    torch, device = watch.torch, watch.device
    torch.manual_seed(0)
    tensors = [None if o is None else o.tensor(torch, device) for o in case.operands]
    ours: Callable[[], Any] = functools.partial(run, *[t for t in tensors if t is not None])
    memory, outputs = watch.memory(ours)
    peer_memory = gap = None
    against = ""
    if (case.peer is None or not case.comparable) and (why := emptiness(torch, outputs)):
        raise Empty(f"{region.name}/{case.name}: {why}, and there is no peer's to compare it with")
    if case.peer is None:
        del outputs
        peer = None
    else:
        made = case.peer(torch, *tensors)
        against, peer = made if isinstance(made, Peer) else (case.against, made)
        peer()  # a library's workspace and first-call compilation are not its memory
        peer_memory, theirs = watch.memory(peer)
        if case.comparable:
            gap = distance(torch, outputs, theirs)
            if gap > FAR:
                raise FarFromPeer(f"{region.name}/{case.name}: outputs are {gap:.2g} (relative L2) off the peer's")
        del outputs, theirs
    copy = None if case.flops else copier(torch, device, case.bytes)
    times = iter(watch.among(*(fn for fn in (ours, peer, copy) if fn is not None)))
    time, peer_time, copy_time = (None if fn is None else next(times) for fn in (ours, peer, copy))
    assert time is not None
    return BenchResult(
        f"{region.name}/{case.name}", time, peer_time, case.bytes / bandwidth, case.flops / flops,
        memory, peer_memory, gap, against, copy_time,
    )  # fmt: skip
