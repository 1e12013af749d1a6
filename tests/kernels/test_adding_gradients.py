"""Gradients added to an fp32 buffer inside the kernel that makes them: the bits of adding afterwards, no copy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from harness import compiles, interpret, reference, spec
from jax.core import ShapedArray

from isojax.errors import Unsupported
from isojax.kernel_plan import Allocate, Copy, kernel_plan
from isojax.pallas_kernels.head import gate_bwd, kernel_bwd_sm90
from isojax.pallas_kernels.linear import kernel_grad_sm90, tiles
from isojax.pallas_kernels.linear.tiles import Tiles
from isojax.region import lookup

WGRAD, HEAD, EMBED = (lookup(n) for n in ("linear.wgrad", "head.logprob_bwd", "embed.lookup_bwd"))
F32, I32 = jnp.float32, jnp.int32


def draw(seed, *shape, dtype=jnp.bfloat16):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def bits(x):
    return np.asarray(x).view(np.uint32)


def differing(a, b):
    return int((bits(a) != bits(b)).sum())


@pytest.fixture
def tile(monkeypatch):
    t = Tiles(64, 64, 32, (1, 1))
    monkeypatch.setattr(tiles, "MAX_STAGES", 2)
    monkeypatch.setattr(kernel_grad_sm90, "tiles_of", lambda *_: t)
    head = Tiles(64, 128, 32, (1, 1))
    monkeypatch.setattr(kernel_bwd_sm90, "tiles_of", lambda *_: dict(dlogits=head, dweight=head, dhidden=head))


@pytest.mark.parametrize("run", (interpret, reference))
def test_wgrad_adds_with_one_rounding(tile, run):
    ct, x, into = draw(0, 64, 128), draw(1, 64, 80), draw(2, 128, 80, dtype=np.float32)
    (apart,), (together,) = run(WGRAD, (ct, x)), run(WGRAD, (ct, x, into))
    assert differing(together, into + np.asarray(apart)) == 0
    assert differing(together, into * np.float32(1 + 2**-23) + np.asarray(apart)) > 0  # control: an ulp is seen


def test_embedding_adds_to_the_rows_that_were_read():
    tokens = np.asarray([3, 5, 3, 9] * 16, np.int32)
    ct, into = draw(4, 64, 128), draw(5, 16, 128, dtype=np.float32)
    (apart,), (together,) = (interpret(EMBED, args, {"vocab": 16}) for args in ((tokens, ct), (tokens, ct, into)))
    assert differing(together, into + np.asarray(apart)) == 0
    untouched = [i for i in range(16) if i not in (3, 5, 9)]
    assert differing(np.asarray(together)[untouched], into[untouched]) == 0


def test_rows_off_the_grid_are_refused():
    args = spec((64, 96)), spec((64, 80)), spec((96, 80), F32)
    with pytest.raises(Unsupported, match="linear.wgrad.*N = 96 with `into`.*multiple of 64"):
        WGRAD.check("sm90", *WGRAD.bind(args, {}))
    args = spec((64,), I32), spec((64, 136)), spec((16, 136), F32)
    with pytest.raises(Unsupported, match="embed.lookup_bwd.*136 columns with `into`.*multiple of 128"):
        EMBED.check("sm90", *EMBED.bind(args, {"vocab": 16}))


def test_head_adds_also_where_a_chunk_reaches_past_the_vocabulary(tile):
    args, statics = gate_bwd.operands(np.random.default_rng(0), 64), {"vocab_chunk": 256}
    into = draw(3, *args[1].shape, dtype=np.float32)
    apart, together = interpret(HEAD, args, statics), interpret(HEAD, (*args, into), statics)
    assert differing(together[1], into + np.asarray(apart[1])) == 0
    assert (np.asarray(together[0]).view(np.uint16) == np.asarray(apart[0]).view(np.uint16)).all()


@pytest.mark.parametrize(
    "region, args, statics",
    (
        (WGRAD, (spec((8192, 4096)), spec((8192, 2048)), spec((4096, 2048), F32)), {}),
        (
            HEAD,
            (
                *(spec((8192, 2048)), spec((151936, 2048)), spec((8192,), I32)),
                *([spec((8192,), F32)] * 3),
                spec((151936, 2048), F32),
            ),
            {},
        ),
        (EMBED, (spec((8192,), I32), spec((8192, 2048)), spec((151936, 2048), F32)), {"vocab": 151936}),
    ),
    ids=("wgrad", "head", "embed"),
)
def test_written_where_it_lies_without_spills(region, args, statics):
    bound, kw = region.bind(args, statics)
    plan = kernel_plan(region, [ShapedArray(a.shape, a.dtype) for a in bound], kw)
    assert not any(isinstance(op, Copy) for op in plan.ops)
    made = [plan.buffers[op.out].shape for op in plan.ops if isinstance(op, Allocate)]
    assert args[-1].shape not in made, "no second buffer of the weight's size"
    compiles(region, args, statics)
