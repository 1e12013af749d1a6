"""Programs in torch on CPU: the bits of jax.jit, in-place writes, inputs that do not fit."""

from __future__ import annotations

import functools
import gc
import time

import jax
import jax.numpy as jnp
import pytest
import torch

from bridges.torch_ops import backend, compile_program, cpu, cuda, xla
from isojax.errors import InputError, Refused, Unavailable
from isojax.program import put, rows, trace
from isojax.region import lookup

from .torch_ops_toys import BF16, F32, I32, Spec, layer, layer_specs, random, same, torch_of


def run(fn, *specs, seed=0, high=7, **kw):
    """(compiled, its flat outputs, jax.jit's outputs) on the same random inputs."""
    args = random(specs, seed, high)
    compiled = compile_program(trace(fn, *specs), arch="cpu", **kw)
    return compiled, compiled(*map(torch_of, jax.tree.leaves(args))), jax.jit(fn)(*args)


def test_forward_has_the_bits_of_jit():
    def model(x, delta, weights):
        for w in weights:
            x, delta = layer(x, delta, w)
        return x, delta

    x, delta, w = layer_specs()
    compiled, got, want = run(model, x, delta, [w] * 3)
    assert same(got, want)
    assert compiled.strided_operands == 0


def test_regions_and_movement_mixed():
    def model(tokens, table, w):
        x = lookup("embed.lookup")(table, tokens)
        a, b = jnp.split(lookup("linear.column")(x, w), 2, axis=-1)  # strided halves
        x = jnp.concatenate([lookup("residual.add")(a, b), x])
        y = jnp.where((jnp.arange(64) % 3 == 0)[:, None], x, 0)
        return (
            rows(y, tokens * 2 + 1),
            jnp.swapaxes(y, 0, 1)[::-1],
            jnp.pad(y, ((1, 2), (0, 0))),
            jnp.full((3,), 2.5, BF16),
        )

    specs = Spec((32,), I32), Spec((9, 64), BF16), Spec((128, 64), BF16)
    compiled, got, want = run(model, *specs)
    assert same(got, want)
    assert compiled.strided_operands == 2, "the two halves are strided, and that has to show"


def test_index_arithmetic():
    def index(i, j):
        outs = [i + j, i - 3, 2 - i, i * j, i // (j + 1), i % (j + 1), -i, jnp.abs(i), jnp.sign(i), jnp.clip(i, 1, 4)]
        outs += [jnp.maximum(i, j), jnp.minimum(i, 2), i & j, i | 8, i ^ j, ~i, i << 2, i >> 1, jnp.cumsum(i)]
        outs += [jax.lax.shift_right_logical(i - 4, 3), jax.lax.cumsum(i, reverse=True)]
        outs += [i < j, i <= 3, i == j, i != j, (i > 2) | (j >= 5), jnp.any(i > 5), jnp.all(i >= 0)]
        outs += [jnp.sum(i), jnp.max(i), jnp.min(j, axis=0), i.astype(jnp.int8), jnp.tile(i, 2), jnp.flip(j)]
        outs += [jax.lax.dynamic_slice(i, (j[0],), (4,)), jnp.stack([i, j], 1), jnp.broadcast_to(i[:, None], (16, 3))]
        outs += [jax.lax.dynamic_slice(i, (jnp.int32(99),), (4,)), jnp.searchsorted]
        return tuple(outs[:-1])

    _, got, want = run(index, Spec((16,), I32), Spec((16,), I32))
    assert same(got, want)


def test_scan_forward_and_reverse():
    def model(x, ws, flags):
        def step(reverse, x, ws):
            def body(carry, inputs):
                w, flag = inputs
                y = lookup("linear.column")(carry, w)
                return jnp.where(flag > 3, y, carry), (y, flag + 1)

            return jax.lax.scan(body, x, ws, reverse=reverse)

        return step(False, x, (ws, flags)), step(True, x, (ws, flags))

    specs = Spec((16, 64), BF16), Spec((3, 64, 64), BF16), Spec((3,), I32)
    compiled, got, want = run(model, *specs)
    assert same(got, want)


def test_two_dimensional_rows_and_put():
    def model(cache, page, slot, new):
        cache = cache.at[page, slot].set(new, mode="promise_in_bounds", wrap_negative_indices=False)
        return cache, cache.at[page, slot].get(mode="promise_in_bounds", wrap_negative_indices=False)

    specs = Spec((5, 4, 16), BF16), Spec((3,), I32), Spec((3,), I32), Spec((3, 16), BF16)
    compiled = compile_program(trace(model, *specs), arch="cpu")
    args = random(specs)
    args = args[0], jnp.array([4, 0, 2], I32), jnp.array([3, 1, 0], I32), args[3]
    assert same(compiled(*map(torch_of, args)), jax.jit(model)(*args))


# -- donation ---------------------------------------------------------------------------------------------------------
def write_then_read(cache, slots, new, w):
    cache = put(cache, slots, lookup("linear.column")(new, w))
    return cache, lookup("residual.add")(rows(cache, slots), new)


CACHE = Spec((64, 64), BF16), Spec((16,), I32), Spec((16, 64), BF16), Spec((64, 64), BF16)


def cache_args():
    cache, _, new, w = random(CACHE)
    return cache, jnp.arange(16, dtype=I32) * 3 + 1, new, w


def test_donated_put_writes_in_place():
    args = cache_args()
    want = jax.jit(write_then_read)(*args)
    flat = list(map(torch_of, args))
    before = flat[0].clone()
    kept = compile_program(trace(write_then_read, *CACHE), arch="cpu")(*flat)
    assert same(kept, want) and torch.equal(flat[0], before), "not donated: the input must not change"
    compiled = compile_program(trace(write_then_read, *CACHE), arch="cpu", donate=(0,))
    got = compiled(*flat)
    assert same(got, want)
    assert got[0].data_ptr() == flat[0].data_ptr() and same(flat[:1], want[:1])


def test_an_index_is_widened_once_for_all_layers():
    def layers(a, b, slots, new):
        return put(a, slots, new), put(b, slots, new), slots.reshape(4, 4)

    specs = CACHE[0], CACHE[0], CACHE[1], CACHE[2]
    cache, slots, new, _ = cache_args()
    compiled = compile_program(trace(layers, *specs), arch="cpu", donate=(0, 1))
    got = compiled(*map(torch_of, (cache, cache, slots, new)))
    assert same(got, jax.jit(layers)(cache, cache, slots, new))
    assert compiled.source.count("long(") == 1, compiled.source


def test_inference_mode():
    with torch.inference_mode():
        flat = list(map(torch_of, cache_args()))
        compiled = compile_program(trace(write_then_read, *CACHE), arch="cpu", donate=(0,))
        got = compiled(*flat)
    assert same(got, jax.jit(write_then_read)(*cache_args())) and got[0].data_ptr() == flat[0].data_ptr()


def test_donated_put_through_a_page_view():
    def paged(pages, slots, new):
        flat = put(pages.reshape(-1, pages.shape[-1]), slots, new)
        return flat.reshape(pages.shape)

    specs = Spec((8, 4, 16), BF16), Spec((5,), I32), Spec((5, 16), BF16)
    pages, _, new = random(specs)
    slots = jnp.array([31, 0, 7, 12, 13], I32)
    flat = list(map(torch_of, (pages, slots, new)))
    (got,) = compile_program(trace(paged, *specs), arch="cpu", donate=(0,))(*flat)
    assert got.data_ptr() == flat[0].data_ptr()
    assert same([flat[0]], jax.jit(paged)(pages, slots, new))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda c, i, n, w: (put(c, i, n), rows(c, i)), "still read at .*test_torch_compile"),
        (lambda c, i, n, w: (put(c, i, n), c), "still read by the caller"),
        (lambda c, i, n, w: (c.reshape(-1), put(c, i, n)), "still read by the caller"),
        (lambda c, i, n, w: put(c, i, c[:16]), "reads the buffer it writes"),
        (lambda c, i, n, w: lookup("residual.add")(c, c), "no put writes into it"),
    ],
)
def test_unsafe_donation_is_refused(fn, message):
    with pytest.raises(Refused, match=message):
        compile_program(trace(fn, *CACHE), arch="cpu", donate=(0,))
    compile_program(trace(fn, *CACHE), arch="cpu")  # without donation it is only slower


def test_donated_input_that_shares_memory_is_refused():
    def two(a, b, i, n):
        return put(a, i, n), put(b, i, n)

    specs = CACHE[0], CACHE[0], CACHE[1], CACHE[2]
    compiled = compile_program(trace(two, *specs), arch="cpu", donate=(0, 1))
    one, i, n = (
        torch.zeros(96, 64, dtype=torch.bfloat16),
        torch.arange(16, dtype=torch.int32),
        torch.ones(16, 64).bfloat16(),
    )
    with pytest.raises(InputError, match="shares memory"):
        compiled(one[:64], one[32:], i, n)
    with pytest.raises(InputError, match="not contiguous"):
        compiled(torch.zeros(64, 128).bfloat16()[:, ::2], one[32:], i, n)


# -- inputs -----------------------------------------------------------------------------------------------------------
def test_int64_is_narrowed_or_refused_never_truncated():
    specs = Spec((9, 64), BF16), Spec((16,), I32)
    compiled = compile_program(trace(lookup("embed.lookup"), *specs), arch="cpu")
    table, tokens = torch.randn(9, 64).bfloat16(), torch.arange(16) % 9
    (got,) = compiled(table, tokens)
    assert torch.equal(got, table[tokens])
    for bad in (2**33 + 5, -(2**31) - 1, 2**31):
        tokens[3] = bad
        with pytest.raises(InputError, match=r"input 1.*int64 values .* do not fit int32"):
            compiled(table, tokens)


def test_inputs_that_do_not_fit():
    x, w = torch.zeros(16, 64, dtype=torch.bfloat16), torch.zeros(32, 64, dtype=torch.bfloat16)
    compiled = compile_program(trace(lookup("linear.column"), Spec((16, 64), BF16), Spec((32, 64), BF16)), arch="cpu")
    for args, message in (
        ((x,), "1 inputs given; the Program takes 2"),
        ((x.float(), w), "input 0.*given torch.float32"),
        ((x[:8], w), r"input 0.*\(8, 64\)"),
        ((x, w.to("meta")), "input 1.*on meta"),
    ):
        with pytest.raises(InputError, match=message):
            compiled(*args)
    with pytest.raises(Unavailable, match="does not run on cuda"):
        compile_program(compiled.program, arch="cpu", device="cuda:0")
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="no CUDA device"):
            compile_program(compiled.program, arch="sm90")


def test_trees():
    specs = layer_specs()
    compiled = compile_program(trace(layer, *specs), arch="cpu")
    args = random(specs)
    h, delta = compiled.tree(*jax.tree.map(torch_of, args))
    assert same((h, delta), jax.jit(layer)(*args))
    with pytest.raises(InputError, match="structure"):
        compiled.tree(args[0])


# -- memory -----------------------------------------------------------------------------------------------------------
def test_misaligned_and_changed_weights_are_read_as_they_are():
    specs = Spec((16, 64), BF16), Spec((32, 64), BF16)
    compiled = compile_program(trace(lookup("linear.column"), *specs), arch="cpu")
    x = torch.randn(16, 64).bfloat16()
    for offset in (0, 1):  # elements: 2 bytes off the allocator's 64
        room = torch.randn(32 * 64 + offset).bfloat16()
        w = room[offset:].view(32, 64)
        assert (w.data_ptr() % cpu.ALIGN != 0) == bool(offset)
        (first,) = compiled(x, w)
        w.neg_()
        (second,) = compiled(x, w)
        assert torch.equal(first, -second), "the second call must see the weights changed in place"


def test_weight_views_are_reused_and_die_with_the_weights(monkeypatch):
    specs = Spec((16, 64), BF16), Spec((32, 64), BF16)
    compiled = compile_program(trace(lookup("linear.column"), *specs), arch="cpu")
    x, w = torch.randn(16, 64).bfloat16(), torch.nn.Parameter(torch.randn(32, 64).bfloat16())
    imported, to_array = [], cpu.to_array
    monkeypatch.setattr(cpu, "to_array", lambda t: imported.append(t.shape) or to_array(t))
    compiled(x, w)
    compiled(x, w)
    assert imported == [x.shape, w.shape]
    key = id(w)
    assert key in cpu._views
    with torch.no_grad():
        w.data = torch.zeros(32, 64).bfloat16()
    assert not compiled(x, w)[0].any(), "new storage under the same parameter"
    del w
    gc.collect()
    assert key not in cpu._views


def test_outputs_outlive_inputs_and_may_be_written():
    specs = Spec((16, 64), BF16), Spec((32, 64), BF16)
    compiled = compile_program(trace(lookup("linear.column"), *specs), arch="cpu")
    args = list(map(torch_of, random(specs)))
    (first,) = compiled(*args)
    want = first.clone()
    (second,) = compiled(*args)
    second.zero_()
    del args
    gc.collect()
    torch.randn(1 << 20)
    assert torch.equal(first, want)


def test_overhead_is_printed(capsys):
    specs = layer_specs(rows=16)
    program = trace(functools.partial(layer), *specs)
    compiled = compile_program(program, arch="cpu")
    flat = list(map(torch_of, jax.tree.leaves(random(specs))))
    compiled(*flat)
    n, start = 50, time.perf_counter()
    for _ in range(n):
        compiled(*flat)
    with capsys.disabled():
        print(f" [{(time.perf_counter() - start) / n / len(program.steps) * 1e6:.0f} us a step]", end="")


def test_float32_runs_on_cpu_too():
    specs = Spec((16, 64), F32), Spec((32, 64), F32)
    _, got, want = run(lookup("linear.column"), *specs)
    assert same(got, want)


def test_gpu_code_path_without_a_gpu(monkeypatch):
    """What is generated for sm90, with the launcher replaced by the reference: tensors in, tensors out."""
    seen = []

    def region_function(region, avals, statics, device):
        fn = cpu.region_function(region, avals, statics)

        def call(*tensors):
            assert all(isinstance(t, torch.Tensor) and t.is_contiguous() for t in tensors)
            seen.append(region.name)
            return tuple(cpu.to_tensor(o) for o in fn(*map(cpu.to_array, tensors)))

        return call

    monkeypatch.setattr(cuda, "region_function", region_function)
    monkeypatch.setattr(xla, "region_function", region_function)
    monkeypatch.setattr(backend, "resolve", lambda arch, device: torch.device("cpu"))
    args = cache_args()
    flat = list(map(torch_of, args))
    program = trace(write_then_read, *CACHE)
    compiled = compile_program(program, arch="sm90", donate=(0,))
    got = compiled(*flat)
    assert same(got, jax.jit(write_then_read)(*args)) and got[0].data_ptr() == flat[0].data_ptr()
    assert seen == program.regions() and compiled.strided_operands == 0
    flat[3] = flat[3].t().contiguous().t()
    compiled(*flat)
    assert compiled.strided_operands == 1
