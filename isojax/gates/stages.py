"""The stages of `isojax gate --stage`: each is a list of steps, and a step gives gate results, one after another.

gates     every region's own gates (isojax.gates.run), on cpu too
light     every region's kernel against its reference on the host, in distance; and twice the same bits
launcher  torch's launcher against jax.jit in bits, eagerly and replayed from a CUDA graph
korder    design rule 2: the MMA instruction and the order of its operands do not show
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from isojax.gates.bits import compare_all
from isojax.gates.calls import SampleCall, sample
from isojax.gates.case import GateResult
from isojax.gates.run import device, each_gate, gated
from isojax.region import lookup

Step = tuple[str, Callable[[], Iterable[GateResult]]]

NEAR = 0.05  # of an output's root mean square: bf16 roundings stay below, a wrong element does not


def gates(only: Sequence[str], arch: str, quick: bool) -> list[Step]:
    names = [lookup(n).name for n in only] or gated()  # an unknown one is refused before anything runs
    return [(name, functools.partial(each_gate, name, arch, quick)) for name in names]


def light(only: Sequence[str], arch: str, quick: bool) -> list[Step]:
    del quick
    return [(c.name, functools.partial(_light, c, arch)) for c in sample(np.random.default_rng(0), only)]


def _light(call: SampleCall, arch: str) -> list[GateResult]:
    got, again = (_jitted(call, call.args, call.statics, device(arch)) for _ in range(2))
    want = _jitted(call, *_for_host(call), device("cpu"))
    far, worst, checked = 0, 0.0, 0
    for g, w in zip(got, want, strict=True):
        g, w = g.astype(np.float64), w.astype(np.float64)
        gap = np.abs(g - w) / (np.sqrt(np.mean(w**2)) + 1e-30)
        far += int(np.count_nonzero(~(gap <= NEAR)))  # a NaN is far
        worst, checked = max(worst, float(np.nanmax(gap))), checked + g.size
    near = GateResult(f"light/{call.name}", checked, far, _is_caught(want), f"farthest {worst:.2g} of the rms")
    same = compare_all(got, again)
    return [near, GateResult(f"light/{call.name}, twice", same.checked, same.differing, _is_caught(want), same.first)]


def _is_caught(want: Sequence[np.ndarray]) -> bool:
    """Control: these outputs, each shifted by one element, are not these outputs."""
    return compare_all(want, [np.roll(w, 1) for w in want]).differing > 0


def _for_host(call: SampleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The reference of attn.core takes tiles of 16 rows, so it gets a work list of those."""
    if "tile" not in call.statics:
        return call.args, call.statics
    from isojax.pallas_kernels.attn.work import capacity, tile_rows, work_list

    tile, lens = tile_rows("cpu", 1), np.diff(call.args[3])
    work = work_list(lens, tile, capacity(call.args[0].shape[0], len(lens), tile))
    return (*call.args[:5], work), dict(call.statics, tile=tile)


def _jitted(call: SampleCall, args: Sequence[Any], statics: dict[str, Any], where: Any) -> list[np.ndarray]:
    """All outputs, without the rows that mean nothing."""
    bound, kw = call.region.bind(tuple(args), statics)
    outs = jax.jit(lambda *xs: call.region.primitive.bind(*xs, **kw))(*[jax.device_put(a, where) for a in bound])
    return [np.asarray(o)[: call.valid] for o in outs]


def launcher(only: Sequence[str], arch: str, quick: bool) -> list[Step]:
    del quick
    return [(c.name, functools.partial(_launcher, c, arch)) for c in sample(np.random.default_rng(0), only)]


def _launcher(call: SampleCall, arch: str) -> list[GateResult]:
    want = _jitted(call, call.args, call.statics, device(arch))
    results = []
    for how, got in zip(("eager", "graph"), _launched(call), strict=True):
        d = compare_all([g[: call.valid] for g in got], want)
        results.append(GateResult(f"launcher/{call.name}, {how}", d.checked, d.differing, _is_caught(want), d.first))
    return results


def _launched(call: SampleCall) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(outputs of an eager launch, outputs of a replayed CUDA graph), the graph's buffers spoilt before the replay."""
    import ml_dtypes
    import torch

    region_function = importlib.import_module("bridges.torch_ops.cuda").region_function
    bound, kw = call.region.bind(call.args, call.statics)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in bound]
    run = region_function(call.region, avals, kw, torch.device("cuda", 0))

    def tensor(a: Any) -> Any:
        a = np.asarray(a)
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(np.ascontiguousarray(a)).cuda()

    def host(t: Any) -> np.ndarray:
        if t.dtype == torch.bfloat16:
            return t.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return t.cpu().numpy()

    xs = [tensor(a) for a in bound]
    eager = [host(o) for o in run(*xs)]
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run(*xs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            captured = run(*xs)
    for o in captured:
        o.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    return eager, [host(o) for o in captured]


def korder(only: Sequence[str], arch: str, quick: bool) -> list[Step]:
    del only, arch, quick
    return [("korder", _korder)]


def _korder() -> list[GateResult]:
    from isojax.gates import korder as rule

    found = rule.check(np.random.default_rng(0))
    caught = found["control_two_chains"] > 0
    names = "mma_sync", "wgmma_swapped", "mma_sync_swapped"
    return [GateResult(f"korder/{n}", found["elements"], found[n], caught) for n in names]


STAGES: dict[str, Callable[[Sequence[str], str, bool], list[Step]]] = {
    "gates": gates,
    "light": light,
    "launcher": launcher,
    "korder": korder,
}


def fenced(name: str, step: Callable[[], Iterable[GateResult]]) -> Iterator[GateResult]:
    """A step whose failure is a result of its own, so that it does not hide the others'."""
    try:
        yield from step()
    except Exception as e:
        yield GateResult(name, 0, 0, False, f"{type(e).__name__}: {e}")
