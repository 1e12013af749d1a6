"""A few calls of every region, with data: small enough for the host, in the shapes that the kernels distinguish.

Regions that are not named here are represented by their gate's row cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from isojax.gates.case import Case
from isojax.gates.run import cases, gated
from isojax.region import REGISTRY, Region, lookup

ROWS = 192


class SampleCall(NamedTuple):
    """args: NumPy arrays, or None where absent. valid: rows of the outputs that mean something, None for all."""

    name: str
    region: Region
    args: tuple[Any, ...]
    statics: dict[str, Any]
    valid: int | None = None


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * scale).astype(jnp.bfloat16)


def sample(rng: np.random.Generator, only: Sequence[str] = ()) -> Iterator[SampleCall]:
    """Calls of every region that has a kernel on sm90, or of those in `only`. Raises RegionError for unknown ones."""
    seen = set()
    for name in only:
        lookup(name)
    for made in (_rowwise(rng), _linear(rng), _head(rng), _attention(rng)):
        for call in made:
            seen.add(call.region.name)
            if not only or call.region.name in only:
                yield call
    for name in gated():
        if name in seen or (only and name not in only) or REGISTRY[name].implementation("sm90").kind != "kernel":
            continue
        for case in cases(name, rng, ROWS):
            if isinstance(case, Case):
                yield SampleCall(f"{name} {case.name}", REGISTRY[name], case.args, dict(case.statics))


def _whole(rng: np.random.Generator, high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, shape).astype(np.int32)


def _norm(rng: np.random.Generator, n: int) -> np.ndarray:
    return (1 + 0.2 * rng.standard_normal(n)).astype(jnp.bfloat16)


def _rowwise(rng: np.random.Generator) -> Iterator[SampleCall]:
    t, d = ROWS, 2048
    yield SampleCall("embed", lookup("embed.lookup"), (normal(rng, 1000, d), _whole(rng, 1000, t)), {})
    yield SampleCall("residual", lookup("residual.add"), (normal(rng, t, d), normal(rng, t, d)), {})
    for d in (576, 2048, 4096):
        statics = dict(eps=1e-6, zero_centered=d == 4096)
        x, delta, weight = normal(rng, t, d), normal(rng, t, d), _norm(rng, d)
        yield SampleCall(f"rms {d}", lookup("norms.rms"), (x, weight), statics)
        yield SampleCall(f"add_rms {d}", lookup("norms.add_rms"), (x, delta, weight), statics)
    yield SampleCall("swiglu", lookup("mlp.swiglu"), (normal(rng, t, 2 * 6144),), {})
    yield SampleCall("accumulate", lookup("grad.accumulate"), tuple(normal(rng, t, 2048) for _ in range(3)), {})


def _linear(rng: np.random.Generator) -> Iterator[SampleCall]:
    for m in (64, 192, 512):
        for n, k in ((4096, 2048), (512, 1024)):
            args = normal(rng, m, k), normal(rng, n, k, scale=0.03)
            yield SampleCall(f"column {m}x{n}x{k}", lookup("linear.column"), args, {})
        for n, k in ((2048, 6144), (512, 1024)):
            args = normal(rng, m, k), normal(rng, n, k, scale=0.03)
            yield SampleCall(f"row {m}x{n}x{k}", lookup("linear.row"), args, dict(leaves=8))


def _head(rng: np.random.Generator) -> Iterator[SampleCall]:
    inverse = (1 / rng.uniform(0.5, 1.5, 64)).astype(np.float32)
    for vocab in (2048, 18944):
        h, w = normal(rng, 64, 1024), normal(rng, vocab, 1024, scale=0.1)
        yield SampleCall(f"logits {vocab}", lookup("head.logits"), (h, w), {})
        rows = (rng.standard_normal((64, vocab)) * 4).astype(np.float32)
        yield SampleCall(f"logprob_rows {vocab}", lookup("head.logprob_rows"), (rows, inverse), {})
        for emit in (False, True):
            args = h, w, _whole(rng, vocab, 64), inverse
            yield SampleCall(f"logprob {vocab} {emit}", lookup("head.logprob"), args, dict(emit_logits=emit))


def _attention(rng: np.random.Generator) -> Iterator[SampleCall]:
    from isojax.model.config import Rope
    from isojax.model.rope import table
    from isojax.pallas_kernels.attn.work import capacity, tile_rows, work_list

    t, core = ROWS, lookup("attn.core")
    for heads, kv, d in ((16, 8, 128), (9, 3, 64), (8, 1, 128)):
        width = (heads + 2 * kv) * d
        rope = table(Rope(theta=1e6), d, 512)
        statics = dict(kv_heads=kv, head_dim=d, eps=1e-6, zero_centered=False)
        args = normal(rng, t, width), normal(rng, width), _norm(rng, d), _norm(rng, d), rope, _whole(rng, 512, t)
        yield SampleCall(f"prep {heads}/{kv}/{d}", lookup("attn.prep"), args, statics)
        lens = np.array([5, 64, 1, 100, 22], np.int32)
        cu = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        tile = tile_rows("sm90", heads // kv)
        work = work_list(lens, tile, capacity(t, 5, tile))
        many = dict(scale=d**-0.5, tile=tile)
        q, own = normal(rng, t, heads, d), normal(rng, t, kv, 2 * d)
        yield SampleCall(f"core own {heads}/{kv}/{d}", core, (q, own, None, cu, lens, work), many, int(cu[-1]))
        for page in (16, 128):
            context = lens + np.array([0, 30, 1300, 0, 70], np.int32)
            blocks = -(-int(context.max()) // page)
            pages = normal(rng, 5 * blocks + 1, page, kv, 2 * d)
            pages[0] = np.nan
            order = 1 + rng.permutation(5 * blocks).astype(np.int32).reshape(5, blocks)
            args = q, pages, order, cu, context, work
            yield SampleCall(f"core page{page} {heads}/{kv}/{d}", core, args, many, int(cu[-1]))
            one = work_list(np.ones(5, np.int32), 1, 8)
            args = q, pages, order, np.arange(6, dtype=np.int32), context, one
            yield SampleCall(f"decode page{page} {heads}/{kv}/{d}", core, args, dict(many, tile=1), 5)
