"""Gradients of every differentiable region against torch autograd in float64, written independently in torch.

Bounds: float32 operands leave only fp32 summation error (1e-4 of the gradient's norm, a few hundred terms); bfloat16
operands add one rounding of each returned activation gradient, of the probabilities and of the forward's own rounded
output: 1.5% of the norm.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from isojax.model import rope
from isojax.model.config import Rope
from isojax.pallas_kernels.attn.work import work_list
from isojax.region import REGISTRY, load_shipped, lookup

load_shipped()
T, D = 32, 64
LENS = (5, 1, 26)
CU = np.cumsum([0, *LENS]).astype(np.int32)
BOUND = {"float32": 1e-4, "bfloat16": 1.5e-2}


def rms(x, w, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


def rotate(x, table):
    cos, sin = (table[:, None, s] for s in (slice(0, D // 2), slice(D // 2, D)))
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def prep(qkv, bias, qn, kn, table, positions):
    x = (qkv + bias).reshape(T, 2, 4, D)
    q, k, v = x[:, :, :2].reshape(T, 4, D), x[:, :, 2], x[:, :, 3]
    angles = table[positions.long()]
    return rotate(rms(q, qn), angles), torch.cat([rotate(rms(k, kn), angles), v], -1)


def attention(q, kv):
    out = []
    for a, b in zip(CU[:-1], CU[1:], strict=True):
        heads = lambda x, a=a, b=b: x[a:b].transpose(0, 1)
        k, v = (heads(kv[..., s]).repeat_interleave(2, 0) for s in (slice(0, D), slice(D, 2 * D)))
        out.append(F.scaled_dot_product_attention(heads(q), k, v, is_causal=True).transpose(0, 1).reshape(b - a, -1))
    return torch.cat(out)


def logprob(h, w, targets, inverse):
    z = torch.log_softmax((h @ w.T) * inverse[:, None], -1)
    return z.gather(1, targets.long()[:, None])[:, 0]


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def cases(rng, dtype):
    real = lambda *s, scale=1.0: jnp.asarray(rng.standard_normal(s) * scale, dtype)
    whole = lambda high, *s: jnp.asarray(rng.integers(0, high, s), jnp.int32)
    norm = lambda n: jnp.asarray(1 + 0.3 * rng.standard_normal(n), dtype)
    table = jnp.asarray(rope.table(Rope(), D, 64))
    core = dict(scale=D**-0.5, tile=16)
    work = work_list(np.array(LENS), 16, 8)
    inverse = jnp.asarray(1 / rng.uniform(0.5, 1.5, T), jnp.float32)
    eps = dict(eps=1e-6)
    return {
        "embed.lookup": ((real(40, D), whole(40, T)), {}, lambda w, t: w[t.long()], (0,)),
        "residual.add": ((real(T, D), real(T, D)), {}, torch.add, (0, 1)),
        "norms.rms": ((real(T, D), norm(D)), eps, rms, (0, 1)),
        "norms.add_rms": (
            (real(T, D), real(T, D), norm(D)),
            eps,
            lambda x, d, w: (x + d, rms(x + d, w)),
            (0, 1, 2),
        ),
        "linear.column": ((real(T, 128), real(48, 128)), {}, F.linear, (0, 1)),
        "linear.row": ((real(T, 128), real(48, 128)), {}, F.linear, (0, 1)),
        "mlp.swiglu": ((real(T, 128),), {}, swiglu, (0,)),
        "attn.prep": (
            (real(T, 8 * D), real(8 * D), norm(D), norm(D), table, whole(64, T)),
            dict(kv_heads=2, head_dim=D, eps=1e-6),
            prep,
            (0, 1, 2, 3),
        ),
        "attn.core": (
            (real(T, 4, D), real(T, 2, 2 * D), None, CU, np.array(LENS, np.int32), work),
            core,
            lambda q, kv, *_: attention(q, kv),
            (0, 1),
        ),
        "head.logprob": (
            (real(T, D), real(300, D, scale=0.3), whole(300, T), inverse),
            {},
            logprob,
            (0, 1),
        ),
    }


def test_every_differentiable_region_is_here():
    shipped = {n for n, r in REGISTRY.items() if r.backward is not None and not n.startswith("toy.")}
    assert shipped == set(cases(np.random.default_rng(0), jnp.float32))


def relative(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def tupled(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(cases(np.random.default_rng(0), jnp.float32)))
def test_against_float64(name, dtype):
    rng = np.random.default_rng(abs(hash(dtype)) % 7)
    args, statics, oracle, diff = cases(rng, jnp.dtype(dtype))[name]
    region = lookup(name)

    def f(*d):
        full = list(args)
        for i, x in zip(diff, d, strict=True):
            full[i] = x
        return region(*full, **statics)

    outs, pull = jax.vjp(jax.jit(f), *[args[i] for i in diff])
    cts = [jnp.asarray(rng.standard_normal(o.shape), o.dtype) for o in tupled(outs)]
    grads = pull(tuple(cts) if isinstance(outs, tuple) else cts[0])

    exact = [None if a is None else torch.tensor(np.asarray(a, np.float64)) for a in args]
    for i in diff:
        exact[i].requires_grad_(True)
    expected = tupled(oracle(*exact))
    torch.autograd.backward(expected, [torch.tensor(np.asarray(c, np.float64)) for c in cts])
    for got, want in zip(tupled(outs), expected, strict=True):
        assert relative(np.asarray(got, np.float64), want.detach().numpy()) < BOUND[dtype]
    for i, grad in zip(diff, grads, strict=True):
        assert relative(np.asarray(grad, np.float64), exact[i].grad.numpy()) < BOUND[dtype], f"operand {i}"


def test_zero_centred_gamma_reaches_the_gradient():
    """Case 7 from the field: w + 1 in the backward, but not in the forward."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((T, D), (D,)))
    y, pull = jax.vjp(lambda x, w: lookup("norms.rms")(x, w, eps=1e-6, zero_centered=True), x, w)
    ct = rng.standard_normal((T, D))
    dx, dw = pull(jnp.asarray(ct, jnp.float32))
    ex, ew = (torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (x, w))
    out = rms(ex, ew + 1)
    out.backward(torch.tensor(np.asarray(jnp.asarray(ct, jnp.float32), np.float64)))
    assert relative(np.asarray(y, np.float64), out.detach().numpy()) < 1e-5
    assert ex.grad is not None and ew.grad is not None
    assert relative(np.asarray(dx, np.float64), ex.grad.numpy()) < 1e-4
    assert relative(np.asarray(dw, np.float64), ew.grad.numpy()) < 1e-4
