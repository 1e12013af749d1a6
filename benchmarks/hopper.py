"""Everything that only a Hopper GPU can show, in one call: `python -m benchmarks.hopper [STAGE ...] [--out FOLDER]`.

Stages: light (every region, kernel against its reference), korder (rule 2 rechecked), gates, launcher, bench.
Each stage is fenced: one failure does not hide the rest. A table comes last, JSON goes to FOLDER.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isojax.gates.bits import compare_all
from isojax.region import Region, load_shipped, lookup

Row = dict[str, Any]
ONLY: list[str] = []  # regions to gate; all where empty


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16)


def light_cases(rng: np.random.Generator) -> Iterator[tuple[str, Region, tuple, dict]]:
    """One or a few calls of every forward region, at shapes of Qwen3-1.7B where that is cheap on the host."""
    from isojax.model.config import Rope
    from isojax.model.rope import table
    from isojax.pallas_kernels.attn.work import capacity, tile_rows, work_list

    whole = lambda high, *s: rng.integers(0, high, s).astype(np.int32)
    norm = lambda n: (1 + 0.2 * rng.standard_normal(n)).astype(jnp.bfloat16)
    t = 192
    yield "embed", lookup("embed.lookup"), (normal(rng, 1000, 2048), whole(1000, t)), {}
    yield "residual", lookup("residual.add"), (normal(rng, t, 2048), normal(rng, t, 2048)), {}
    for d in (576, 2048, 4096):
        statics = dict(eps=1e-6, zero_centered=d == 4096)
        yield f"rms {d}", lookup("norms.rms"), (normal(rng, t, d), norm(d)), statics
        yield f"add_rms {d}", lookup("norms.add_rms"), (normal(rng, t, d), normal(rng, t, d), norm(d)), statics
    yield "swiglu", lookup("mlp.swiglu"), (normal(rng, t, 2 * 6144),), {}
    yield "accumulate", lookup("grad.accumulate"), tuple(normal(rng, t, 2048) for _ in range(3)), {}
    for m in (64, 192, 512):
        for n, k in ((4096, 2048), (512, 1024)):
            yield f"column {m}x{n}x{k}", lookup("linear.column"), (normal(rng, m, k), normal(rng, n, k, scale=0.03)), {}
        for n, k in ((2048, 6144), (512, 1024)):
            yield (
                f"row {m}x{n}x{k}",
                lookup("linear.row"),
                (normal(rng, m, k), normal(rng, n, k, scale=0.03)),
                dict(leaves=8),
            )
    for vocab in (2048, 18944):
        h, w = normal(rng, 64, 1024), normal(rng, vocab, 1024, scale=0.1)
        inverse = (1 / rng.uniform(0.5, 1.5, 64)).astype(np.float32)
        yield f"logits {vocab}", lookup("head.logits"), (h, w), {}
        rows = (rng.standard_normal((64, vocab)) * 4).astype(np.float32)
        yield f"logprob_rows {vocab}", lookup("head.logprob_rows"), (rows, inverse), {}
        for emit in (False, True):
            yield (
                f"logprob {vocab} {emit}",
                lookup("head.logprob"),
                (h, w, whole(vocab, 64), inverse),
                dict(emit_logits=emit),
            )
    for heads, kv, d in ((16, 8, 128), (9, 3, 64), (8, 1, 128)):
        width = (heads + 2 * kv) * d
        rope = table(Rope(theta=1e6), d, 512)
        statics = dict(kv_heads=kv, head_dim=d, eps=1e-6, zero_centered=False)
        qk = (norm(d), norm(d))
        yield (
            f"prep {heads}/{kv}/{d}",
            lookup("attn.prep"),
            (normal(rng, t, width), normal(rng, width), *qk, rope, whole(512, t)),
            statics,
        )
        lens = np.array([5, 64, 1, 100, 22], np.int32)
        cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        tile = tile_rows("sm90", heads // kv)
        work = work_list(lens, tile, capacity(t, 5, tile))
        core = dict(scale=d**-0.5, tile=tile)
        q, own = normal(rng, t, heads, d), normal(rng, t, kv, 2 * d)
        yield f"core own {heads}/{kv}/{d}", lookup("attn.core"), (q, own, None, cu, lens, work), core
        for page in (16, 128):
            context = lens + np.array([0, 30, 1300, 0, 70], np.int32)
            width_of = -(-int(context.max()) // page)
            pages = normal(rng, 5 * width_of + 1, page, kv, 2 * d)
            pages[0] = np.nan
            order = 1 + rng.permutation(5 * width_of).astype(np.int32).reshape(5, width_of)
            args = (q, pages, order, cu, context, work)
            yield f"core page{page} {heads}/{kv}/{d}", lookup("attn.core"), args, core
            single = np.ones(5, np.int32)
            one = work_list(single, 1, 8)
            decode = (q, pages, order, np.arange(6, dtype=np.int32), context, one)
            yield f"decode page{page} {heads}/{kv}/{d}", lookup("attn.core"), decode, dict(core, tile=1)


def light(rng: np.random.Generator) -> Iterator[Row]:
    """Kernel on the GPU against the reference on the host: largest distance over the output's root mean square."""
    for name, region, args, statics in light_cases(rng):
        yield guarded(f"light/{name}", _light, region, args, statics)


def _light(region: Region, args: tuple, statics: dict) -> Row:
    gpu, cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]
    present = [a for a in args if a is not None]

    def call(*xs):
        it = iter(xs)
        return region.all_outputs(*[None if a is None else next(it) for a in args], **statics)

    kernel = jax.jit(call)
    got = [np.asarray(o) for o in kernel(*[jax.device_put(a, gpu) for a in present])]
    again = [np.asarray(o) for o in kernel(*[jax.device_put(a, gpu) for a in present])]
    kw = dict(statics, tile=16) if "tile" in statics else statics
    ref_args = list(args)
    if "tile" in statics:
        from isojax.pallas_kernels.attn.work import capacity, work_list

        q_lens = np.diff(args[3])
        ref_args[5] = work_list(q_lens, 16, capacity(args[0].shape[0], len(q_lens), 16))
    want = [
        np.asarray(o)
        for o in jax.jit(lambda *xs: region.all_outputs(*_full(ref_args, xs), **kw))(
            *[jax.device_put(a, cpu) for a in ref_args if a is not None]
        )
    ]
    worst = 0.0
    for g, w in zip(got, want, strict=True):
        g, w = g.astype(np.float64), w.astype(np.float64)
        if region.name == "attn.core":
            g, w = g[: args[3][-1]], w[: args[3][-1]]
        scale = np.sqrt(np.mean(w**2)) + 1e-30
        worst = max(worst, float(np.abs(g - w).max() / scale)) if np.isfinite(g).all() else np.inf
    return dict(worst_over_rms=round(worst, 6), repeatable=compare_all(tuple(got), tuple(again)).differing == 0)


def _full(args: list[Any], xs: Any) -> list[Any]:
    it = iter(xs)
    return [None if a is None else next(it) for a in args]


def gates(rng: np.random.Generator) -> Iterator[Row]:
    """Every region's gate through jax.jit on the GPU."""
    from isojax.gates.run import gated

    del rng
    for name in [n for n in gated() if not ONLY or n in ONLY]:
        yield guarded(f"gate/{name}", _gate, name)


def _gate(name: str) -> Row:
    from isojax.gates.run import run_gate

    results = run_gate(name, "sm90", quick=False)
    return dict(
        gates=len(results),
        checked=sum(r.checked for r in results),
        differing=sum(r.differing for r in results),
        controls=all(r.negative_control_caught for r in results),
        detail="; ".join(r.name for r in results if not r.passed),
    )


def launcher(rng: np.random.Generator) -> Iterator[Row]:
    """The torch launcher against jax.jit: bit for bit, also inside a CUDA graph."""
    for name, region, args, statics in light_cases(rng):
        yield guarded(f"launcher/{name}", _launch, region, args, statics)


def _launch(region: Region, args: tuple, statics: dict) -> Row:
    import ml_dtypes
    import torch

    from bridges.torch_ops.cuda import region_function

    gpu = jax.devices("cuda")[0]

    bound, kw = region.bind(args, statics)
    jitted = jax.jit(lambda *xs: region.primitive.bind(*xs, **kw))
    want = [np.asarray(o) for o in jitted(*[jax.device_put(a, gpu) for a in bound])]
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in bound]
    run = region_function(region, avals, kw, torch.device("cuda", 0))

    def tensor(a):
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.int16).copy()).view(torch.bfloat16).cuda()
        return torch.from_numpy(np.ascontiguousarray(a)).cuda()

    xs = [tensor(a) for a in bound]
    outs = run(*xs)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        run(*xs)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            captured = run(*xs)
    for o in captured:
        o.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    host = lambda o: o.view(torch.int16).cpu().numpy() if o.dtype == torch.bfloat16 else o.cpu().numpy()
    bits = lambda a: a.view(np.int16 if a.dtype.itemsize == 2 else np.int32)
    rows = int(args[3][-1]) if region.name == "attn.core" else None
    diff = lambda got: sum(
        int((bits(w)[:rows] != host(g).view(bits(w).dtype)[:rows]).sum()) for w, g in zip(want, got, strict=True)
    )
    return dict(eager_differing=diff(outs), graph_differing=diff(captured))


BENCH: tuple[
    tuple[str, str], ...
] = (  # a region and its cases: a sample of each kind, since every case compiles two kernels
    ("linear.column", r"T(64|256|1024|4096|16384) "),
    ("linear.row", r"T(64|256|1024|4096|16384) "),
    ("attn.core", r"Qwen3-1.7B (causal (16 x 1024|4 x 4096|1 x 16384)|decode (1 x 32768|64 x 2048|256 x 1024))"),
    ("norms.rms", r"T(64 D4096|16384 D2048)"),
    ("norms.add_rms", r"T(64 D4096|16384 D2048)"),
    ("mlp.swiglu", r"T(64|16384) F6144"),
    ("attn.prep", r"Qwen3-1.7B"),
    ("head.logits", r"T(64|1024)"),
    ("head.logprob_rows", r"T64"),
    ("head.logprob", r"T(1024|4096)"),
    ("residual.add", r"T16384 D2048"),
    ("embed.lookup", r"T16384 D2048"),
)


def bench(rng: np.random.Generator) -> Iterator[Row]:
    """Kernels through the launcher against their peers and floors."""
    import torch

    from bridges.torch_ops.cuda import region_function
    from isojax.gates.bench import run_bench

    del rng
    device = torch.device("cuda", 0)
    launch = lambda region, avals, statics: region_function(region, avals, statics, device)
    for name, match in [b for b in BENCH if not ONLY or b[0] in ONLY]:

        def make(name=name, match=match):
            found = run_bench(name, device, launch, match)
            return dict(
                cases={
                    r.name: dict(
                        us=round(r.us, 1), peer_us=r.peer_us and round(r.peer_us, 1), floor_us=round(r.floor_us, 1)
                    )
                    for r in found
                }
            )

        yield guarded(f"bench/{name}", make)


def korder(rng: np.random.Generator) -> Iterator[Row]:
    """Design rule 2, rechecked: wgmma, mma.sync and swapped operands give the same bits for one K order."""
    from isojax.gates import korder as rule

    yield guarded("korder", lambda: rule.check(rng))


def verdict(row: Row) -> str:
    """What is wrong with a row that ran, or ''."""
    bad = [k for k in row if k.endswith("differing") or k in ("mma_sync", "wgmma_swapped", "mma_sync_swapped")]
    wrong = [f"{k} = {row[k]}" for k in bad if row[k]]
    if row.get("control_two_chains") == 0 or row.get("controls") is False:
        wrong.append("a negative control passed")
    if row.get("repeatable") is False or row.get("worst_over_rms", 0) > 0.05:
        wrong.append("far from the reference, or not repeatable")
    return "; ".join(wrong)


def guarded(name: str, make: Callable[..., Row], *args: Any) -> Row:
    started = time.perf_counter()
    try:
        row = dict(name=name, ok=True, **make(*args))
    except Exception as e:
        row = dict(name=name, ok=False, error=f"{type(e).__name__}: {e}"[:400], trace=traceback.format_exc()[-1500:])
    row["s"] = round(time.perf_counter() - started, 2)
    print({k: v for k, v in row.items() if k != "trace"}, flush=True)
    return row


STAGES: dict[str, Callable[[np.random.Generator], Iterator[Row]]] = dict(
    light=light, gates=gates, launcher=launcher, bench=bench, korder=korder
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("stages", nargs="*", metavar="STAGE")
    parser.add_argument("--out", default=".")
    parser.add_argument("--only", action="append", default=[], help="gate this region only; repeatable")
    options = parser.parse_args()
    unknown = sorted(set(options.stages) - set(STAGES))
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; stages are {', '.join(sorted(STAGES))}")
    ONLY.extend(options.only)
    load_shipped()
    print("jax", jax.__version__, jax.devices(), flush=True)
    rows = []
    for stage in options.stages or sorted(STAGES):
        rows += list(STAGES[stage](np.random.default_rng(0)))
        (Path(options.out) / "hopper.json").write_text(json.dumps(rows, indent=1, default=str))
    good = [r for r in rows if r["ok"] and not verdict(r)]
    for r in rows:
        if r not in good:
            print("NOT GOOD", r["name"], r.get("error") or verdict(r))
    print(f"{len(good)} of {len(rows)} good")
    sys.exit(0 if rows and len(good) == len(rows) else 1)  # nothing measured is no success


if __name__ == "__main__":
    main()
