"""One region as a torch op: any row count, gradients, torch.compile, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from bridges.torch_ops import region_op
from bridges.torch_ops.single import bucket
from isojax.errors import InputError, RegionError, Unavailable, Unsupported
from isojax.region import forget, lookup, region

from .torch_ops_toys import bits, same, torch_of


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def jax_of(x):
    return jax.dlpack.from_dlpack(x.detach().contiguous())


@pytest.mark.parametrize("rows", [0, 1, 5, 16, 37])
def test_any_row_count_has_the_bits_of_the_region(rows):
    torch.manual_seed(rows)
    x, delta, w = bf16(rows, 64), bf16(rows, 64), bf16(64)
    got = region_op("norms.add_rms")(x, delta, w, eps=1e-6)
    if rows == 0:
        assert [g.shape for g in got] == [(0, 64), (0, 64)]
        return
    padded = bucket(rows, 16)
    pad = lambda t: jnp.pad(jax_of(t), ((0, padded - rows), (0, 0)), constant_values=3)  # garbage below
    want = jax.jit(lambda *a: lookup("norms.add_rms")(*a, eps=1e-6))(pad(x), pad(delta), jax_of(w))
    assert same(got, [o[:rows] for o in want])


def test_gradients_have_the_bits_of_jax():
    torch.manual_seed(0)
    x, w, ct = bf16(32, 64), bf16(96, 64), bf16(32, 96)
    x.requires_grad_()
    w.requires_grad_()
    region_op("linear.column")(x, w).backward(ct)
    pull = lambda x, w, ct: jax.vjp(lookup("linear.column"), x, w)[1](ct)
    dx, dw = jax.jit(pull)(jax_of(x), jax_of(w), jax_of(ct))
    assert bits(x.grad) == bits(dx)
    assert w.grad is not None
    assert dw.dtype == jnp.float32 and torch.equal(w.grad, torch_of(dw).bfloat16())


def test_gradients_of_absent_and_integer_operands():
    torch.manual_seed(0)
    q_norm = bf16(16).requires_grad_()
    qkv, rope = bf16(5, 64).requires_grad_(), torch.randn(32, 16)
    prep = region_op("attn.prep")
    q, kv = prep(qkv, None, q_norm, None, rope, torch.arange(5), kv_heads=1, head_dim=16, eps=1e-6)
    assert q.shape == (5, 2, 16) and kv.shape == (5, 1, 32)
    q.float().sum().backward()  # kv gets no gradient: zeros
    assert qkv.grad is not None and q_norm.grad is not None
    assert qkv.grad.shape == qkv.shape and q_norm.grad.shape == (16,)


def test_variadic_region_and_int64_indices():
    a, b = bf16(4, 8), bf16(4, 8)
    assert torch.equal(region_op("grad.accumulate")(a, b), (a.float() + b.float()).bfloat16())
    table, tokens = bf16(9, 64), torch.tensor([3, 8, 0])
    embed = region_op("embed.lookup")
    assert torch.equal(embed(table, tokens), table[tokens])
    with pytest.raises(InputError, match="do not fit int32"):
        embed(table, tokens + 2**33)


def test_opaque_to_torch_compile():
    """In its own process: the suite switches torch.compile off, for vLLM's sake."""
    keep = {k: v for k, v in os.environ.items() if k not in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")}
    script = Path(__file__).with_name("torch_ops_dynamo.py")
    done = subprocess.run([sys.executable, str(script)], env=keep, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.count("equal") == 2, done.stderr[-3000:]


def test_torch_checks_the_registration():
    region_op("norms.rms")
    op = torch.ops.isojax.norms_rms.default
    x, w = bf16(16, 64).requires_grad_(), bf16(64).requires_grad_()
    torch.library.opcheck(
        op,
        (x, w),
        dict(eps=1e-6, zero_centered=False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_statics_of_every_kind_and_redefinition():
    def define(factor):
        forget("toy.statics")

        @region("toy.statics", rows=("x",))
        def statics(x, *, mode: str, sizes: tuple[int, ...], scale: float = 2.0): ...

        def reference(x, *, mode, sizes, scale):
            assert mode == "a" and sizes == (1, 2)
            return x * (factor * scale)

        statics.reference(reference)
        return statics

    x = torch.ones(3, 8)
    assert region_op(define(1.0))(x, mode="a", sizes=(1, 2))[0, 0] == 2.0
    assert region_op(define(10.0))(x, mode="a", sizes=(1, 2), scale=3.0)[0, 0] == 30.0
    x.requires_grad_()
    y = region_op(lookup("toy.statics"))(x, mode="a", sizes=(1, 2))
    with pytest.raises(Unsupported, match="toy.statics.*vjp"):
        y.sum().backward()
    forget("toy.statics")


def test_calls_that_do_not_fit():
    rms = region_op("norms.rms")
    x, w = bf16(3, 64), bf16(64)
    with pytest.raises(RegionError, match="no region 'norms.rmz'"):
        region_op("norms.rmz")
    for call in (lambda: rms(x, w), lambda: rms(x, w, x, eps=1.0), lambda: rms(x, w, eps=1.0, epsilon=2.0)):
        with pytest.raises(RegionError, match="region norms.rms takes"):
            call()
    with pytest.raises(InputError, match="heights"):
        region_op("residual.add")(x, bf16(4, 64))
    with pytest.raises(Unavailable, match="is for sm90"):
        region_op("norms.rms", arch="sm90")(x, w, eps=1e-6)


def test_bucket():
    for rows in (*range(1, 600), 4095, 4096, 4097):
        for tile in (16, 64):
            b = bucket(rows, tile)
            assert b >= rows and b % tile == 0 and (b - rows < tile or (b - rows) * 8 <= rows)
    assert len({bucket(n, 64) for n in range(1, 8193)}) < 80
