"""Gradients in torch: one Function for a traced function, fp32 weight gradients, the same regions with and without."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from bridges.torch_ops import compile_program, diff_positions, layer_function
from isojax.errors import Refused
from isojax.program import trace, trace_vjp

from .torch_ops_toys import bits, layer, layer_specs, random, same, torch_of

SPECS = layer_specs()


def built():
    fwd, bwd = trace_vjp(layer, *SPECS, diff=(0, 1, 2))
    positions = diff_positions(SPECS, (0, 1, 2))
    return fwd, layer_function(fwd, bwd, diff=positions, n_out=2, arch="cpu")


def tensors(args):
    return [torch_of(a).requires_grad_() for a in jax.tree.leaves(args)]


def jax_grads(args, cts):
    return jax.jit(lambda args, cts: jax.vjp(layer, *args)[1](cts))(args, cts)


def test_scoring_and_training_call_the_same_regions():
    fwd, fn = built()
    assert trace(layer, *SPECS).regions() == fwd.regions() == fn.forward.program.regions()


def test_gradients_have_the_bits_of_jit():
    _, fn = built()
    args = random(SPECS)
    flat = tensors(args)
    outs = fn(*flat)
    want, pull = jax.vjp(layer, *args)
    cts = random((SPECS[0], SPECS[1]), seed=5)
    seen = {}

    def on_grad(i, leaf, grad):
        assert leaf is flat[i], "the caller's own tensor, where main_grad hangs"
        seen[i] = grad
        return grad.to(leaf.dtype)

    outs = fn(*flat, on_grad=on_grad)
    torch.autograd.backward(outs, list(map(torch_of, cts)))
    grads = jax.tree.leaves(jax_grads(args, cts))
    assert same(outs, jax.jit(layer)(*args))
    assert [seen[i].dtype for i in range(5)] == [torch.bfloat16] * 2 + [torch.float32] * 3
    assert all(bits(seen[i]) == bits(g) for i, g in enumerate(grads))
    assert all(x.grad is not None and x.grad.dtype is torch.bfloat16 for x in flat)
    assert fn.backward.strided_operands == 0


def test_no_grad_gives_the_same_bits():
    _, fn = built()
    args = random(SPECS)
    flat = tensors(args)
    with torch.no_grad():
        scored = fn(*flat)
    plain = compile_program(trace(layer, *SPECS), arch="cpu")(*flat)
    trained = fn(*flat)
    assert all(bits(a) == bits(b) == bits(c) for a, b, c in zip(scored, plain, trained, strict=True))
    assert trained[0].requires_grad and not scored[0].requires_grad


def test_layers_chained_equal_the_whole():
    _, fn = built()
    args = random(SPECS)
    x, delta, w = args

    def two(x, delta, w):
        return layer(*layer(x, delta, w), w)

    flat = tensors(args)
    main = {}

    def on_grad(i, leaf, grad):
        if i >= 2:  # a weight, used by both layers: fp32 into main_grad, as Megatron keeps it
            main[i] = main[i] + grad if i in main else grad.clone()
            return None
        return grad

    outs = fn(*fn(*flat, on_grad=on_grad), *flat[2:], on_grad=on_grad)
    assert same(outs, jax.jit(two)(*args))
    torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    assert all(leaf.grad is None for leaf in flat[2:]) and sorted(main) == [2, 3, 4]
    assert flat[0].grad is not None


def test_only_what_backward_reads_is_kept():
    fwd, fn = built()
    assert len(fn.forward.program.outputs) < len(fwd.outputs)
    used = {v for s in fn.backward.program.steps for v in s.ins if isinstance(v, int)}
    assert set(fn.backward.program.inputs[:-2]) <= used
    flat = tensors(random(SPECS))
    weights = {x.data_ptr() for x in flat[2:]}
    outs = fn(*flat)
    node: Any = outs[0].grad_fn  # of a Function: torch's type is that of every node
    assert weights <= {s.data_ptr() for s in node.saved_tensors}, "weights are kept as they are, not copied"


def test_expanded_cotangents():
    _, fn = built()
    flat = tensors(random(SPECS))
    h, delta = fn(*flat)
    (h.float().sum() + delta.float().sum()).backward()
    assert flat[0].grad is not None and fn.backward.strided_operands == 0


def test_pairs_that_do_not_fit_are_refused():
    fwd, bwd = trace_vjp(layer, *SPECS, diff=(0, 1, 2))
    with pytest.raises(Refused, match="gives 5 gradients; pass trace_vjp's pair"):
        layer_function(fwd, bwd, diff=(0, 1), n_out=2, arch="cpu")
    with pytest.raises(Refused, match="does not fit"):
        layer_function(fwd, bwd, diff=range(5), n_out=1, arch="cpu")


def test_gradients_are_added_to_buffers_inside_their_regions():
    """Bits of adding afterwards: fp32 buffer plus fp32 gradient, one rounding. A partial offer adds nothing."""
    _, fn = built()
    flat = tensors(random(SPECS))
    start = [torch.randn(x.shape) for x in flat]

    def gradients(held):
        seen = {}

        def on_grad(i, leaf, grad):
            seen[i] = grad

        outs = fn(*flat, on_grad=on_grad, into=lambda i, leaf: held.get(i))
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
        return seen

    apart = gradients({})
    held = {i: start[i].clone() for i in (2, 3, 4)}
    offered = gradients(held)
    assert fn.adding is not None
    program, added = fn.adding
    assert [fn.diff[g] for g in added] == [3, 4], "both linears' weights; a norm's gradient has no such region"
    assert len(program.program.inputs) == len(fn.backward.program.inputs) + 2
    for i in (3, 4):
        assert offered[i] is held[i] and torch.equal(held[i], start[i] + apart[i])
    assert torch.equal(held[2], start[2]) and torch.equal(offered[2], apart[2])
    one = {3: start[3].clone()}
    again = gradients(one)
    assert torch.equal(one[3], start[3]) and torch.equal(again[3], apart[3])
