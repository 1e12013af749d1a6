"""On a Hopper GPU: launched kernels against jax.jit, streams, CUDA graphs, in-place writes, gradients.

Run with JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false, so that JAX can be compared with.
"""

from __future__ import annotations

import jax
import pytest
import torch

from bridges.torch_ops import compile_program, diff_positions, layer_function, region_op
from isojax.errors import Unavailable
from isojax.program import put, rows, trace, trace_vjp
from isojax.region import lookup

from .torch_ops_toys import BF16, I32, Spec, layer, layer_specs, random

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs an NVIDIA Hopper GPU")]
SPECS = layer_specs(rows=128, width=512, inner=1024)


def on_gpu(args):
    return [torch.from_dlpack(a).cuda() for a in jax.tree.leaves(jax.device_put(args, jax.devices("cpu")[0]))]


def same(tensors, arrays):
    raw = lambda t: t.contiguous().reshape(-1).view(torch.uint8)
    pairs = zip(tensors, jax.tree.leaves(arrays), strict=True)
    return all(torch.equal(raw(t), raw(torch.from_dlpack(a).to(t.device))) for t, a in pairs)


def jit_on_gpu(fn, args):
    return jax.jit(fn)(*jax.device_put(args, jax.devices("cuda")[0]))


def test_launched_is_jitted():
    args = random(SPECS)
    compiled = compile_program(trace(layer, *SPECS), arch="sm90")
    assert same(compiled(*on_gpu(args)), jit_on_gpu(layer, args))


def test_kept_kernels_give_the_bits_of_compiled_ones(tmp_path, monkeypatch):
    from bridges.torch_ops import cuda

    monkeypatch.setenv("ISOJAX_CACHE", str(tmp_path))
    B = torch.bfloat16
    avals = jax.ShapeDtypeStruct((128, 1024), "bfloat16"), jax.ShapeDtypeStruct((512, 1024), "bfloat16")
    region, device = lookup("linear.row"), torch.device("cuda", torch.cuda.current_device())
    bound, kw = region.bind(avals, dict(leaves=8))
    key = cuda._key(region, bound, kw, device)
    cuda._launchers.pop(key, None)
    cuda.prepare([(region, bound, kw)], device)
    kept = cuda._launchers.pop(key)  # made by a worker, loaded from its file
    here = cuda.region_function(region, bound, kw, device)
    x, w = torch.randn(128, 1024, device=device).to(B), torch.randn(512, 1024, device=device).to(B)
    graph = torch.cuda.CUDAGraph()
    want = [o.clone() for o in here(x, w)]
    assert all(torch.equal(a, b) for a, b in zip(kept(x, w), want, strict=True))
    with torch.cuda.graph(graph):
        outs = kept(x, w)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


def test_side_stream_and_graph_replay_with_new_contents():
    compiled = compile_program(trace(layer, *SPECS), arch="sm90")
    args = random(SPECS)
    flat = on_gpu(args)
    want = [o.clone() for o in compiled(*flat)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        beside = compiled(*flat)
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(beside, want, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = compiled(*flat)
    for seed in (0, 1):
        other = random(SPECS, seed)
        for x, y in zip(flat, on_gpu(other), strict=True):
            x.copy_(y)
        graph.replay()
        assert same(outs, jit_on_gpu(layer, other))


def test_donated_put_in_a_graph():
    def step(cache, slots, new):
        cache = put(cache, slots, new)
        return cache, lookup("residual.add")(rows(cache, slots), new)

    specs = Spec((256, 512), BF16), Spec((64,), I32), Spec((64, 512), BF16)
    compiled = compile_program(trace(step, *specs), arch="sm90", donate=(0,))
    cache, _, new = on_gpu(random(specs))
    slots = torch.arange(64, device="cuda") * 4  # int64: narrowed on the device
    compiled(cache, slots, new)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, y = compiled(cache, slots, new)
    slots.add_(1)
    cache.zero_()
    graph.replay()
    assert torch.equal(cache[slots], new) and cache.count_nonzero() == new.count_nonzero()
    assert torch.equal(y, (new.float() * 2).bfloat16())


def test_capture_before_compiling_is_refused():
    op, x, w = region_op("norms.rms"), torch.randn(64, 768).bfloat16().cuda(), torch.randn(768).bfloat16().cuda()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Unavailable, match="not compiled yet"):
        with torch.cuda.graph(graph):
            op(x, w, eps=1e-6)


def test_gradients():
    fwd, bwd = trace_vjp(layer, *SPECS, diff=(0, 1, 2))
    fn = layer_function(fwd, bwd, diff=diff_positions(SPECS, (0, 1, 2)), n_out=2, arch="sm90")
    args, cts = random(SPECS), random(SPECS[:2], seed=5)
    flat = [x.requires_grad_() for x in on_gpu(args)]
    seen = {}
    outs = fn(*flat, on_grad=lambda i, leaf, g: seen.setdefault(i, g).to(leaf.dtype))
    torch.autograd.backward(outs, on_gpu(cts))
    want = jit_on_gpu(lambda args, cts: jax.vjp(layer, *args)[1](cts), (args, cts))
    assert same([seen[i] for i in range(5)], want)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_region_op_rows(count):
    w = torch.randn(512, 512, device="cuda").bfloat16()
    x = torch.randn(512, 512, device="cuda").bfloat16()
    op = region_op("linear.column", arch="sm90")
    assert torch.equal(op(x, w)[:count], op(x[:count], w))
