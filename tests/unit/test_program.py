"""Tracing: what a program may hold, and what is refused by name and source line."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isojax import program
from isojax.errors import Refused, RegionError, Unsupported
from isojax.model import dense
from isojax.model.config import DenseConfig
from isojax.region import REGISTRY, lookup, region
from isojax.types import spec

X = spec("bf16", 16, 32)


def line_of(fn, text):
    source, first = inspect.getsourcelines(fn)
    return first + next(i for i, s in enumerate(source) if text in s)


def refused_at(fn, *specs):
    with pytest.raises(Refused) as e:
        program.trace(fn, *specs)
    return str(e.value)


def test_stray_sum_is_refused_at_its_line():
    def model(x):
        y = lookup("residual.add")(x, x)
        return jnp.sum(y, axis=-1)  # stray

    message = refused_at(model, X)
    assert "reduce_sum" in message or "convert_element_type" in message
    assert f"{__file__}:{line_of(model, '# stray')}" in message


@pytest.mark.parametrize(
    "stray",
    [
        lambda x: x + x,
        lambda x: x * 2,
        lambda x: jax.nn.silu(x),
        lambda x: x.astype(jnp.float32),
        lambda x: x.at[0].add(x[1]),
        lambda x: jnp.take(x, jnp.array([1, 2]), axis=0),
        lambda x: x @ x.T,
        lambda x: jax.lax.cond(True, lambda a: a, lambda a: a, x),
        lambda x: jnp.argmax(x, -1),
        lambda x: jax.nn.softmax(x),
    ],
)
def test_arithmetic_outside_a_region_is_refused(stray):
    assert f"{__file__}:" in refused_at(stray, X)


def test_dead_arithmetic_is_refused_too():
    def model(x):
        _ = x * 2
        return x

    assert "mul" in refused_at(model, X)


def test_captured_weights_are_refused():
    weight = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(Refused, match="closed-over array"):
        program.trace(lambda x: lookup("linear.column")(x, weight), spec("bf16", 16, 64))


def test_two_gradients_may_not_meet_outside_a_region():
    def twice(x):
        return lookup("residual.add")(x, lookup("mlp.swiglu")(jnp.concatenate([x, x], -1)))

    with pytest.raises(Refused, match="fan"):
        program.trace_vjp(twice, X)


def test_fan_adds_gradients_in_a_region():
    def twice(x):
        a, b, c = program.fan(x, 3)
        return lookup("residual.add")(a, lookup("mlp.swiglu")(jnp.concatenate([b, c], -1)))

    forward, backward = program.trace_vjp(twice, X)
    assert backward.regions() == ["mlp.swiglu_bwd", "grad.accumulate"]
    assert forward.regions() == program.trace(twice, X).regions()


def config(**kw):
    base: dict[str, Any] = dict(family="qwen3", vocab=64, hidden=64, intermediate=64, layers=2, heads=4, kv_heads=2)
    base |= dict(head_dim=16, eps=1e-6, positions=64, tied=True, qk_norm=True)
    return DenseConfig(**(base | kw))


def test_a_whole_model_traces_to_regions_and_movement():
    c = config()
    graph, params = dense.abstract(c)
    batch = dense.Batch(spec("i32", 16), spec("i32", 9), spec("i32", 8), spec("i32", 9, 2), spec("f32", 64, 16))
    p = program.trace(lambda w, t, b: dense.bind(graph, w).hidden(t, b)[0], params, spec("i32", 16), batch)
    assert {s.kind for s in p.steps} == {"region"}
    assert p.regions().count("linear.row") == 2 * c.layers


def test_training_and_scoring_call_the_same_regions():
    """Rule 9: the forward that carries gradients is the one that is compared."""
    c = config()
    graph, params = dense.abstract(c)
    batch = dense.Batch(spec("i32", 16), spec("i32", 9), spec("i32", 8), spec("i32", 9, 2), spec("f32", 64, 16))
    layer = {k.removeprefix("layers.0."): v for k, v in params.items() if k.startswith("layers.0.")}

    def boundary(w, h, b):
        whole = {f"layers.0.{k}": v for k, v in w.items()}
        return dense.bind(graph, params | whole).layers[0].boundary(h, b)

    hidden = spec("bf16", 16, 64)
    forward, backward = program.trace_vjp(boundary, layer, hidden, batch, diff=(0, 1))
    assert forward.regions() == program.trace(boundary, layer, hidden, batch).regions()
    assert all(r.endswith(("_bwd", "grad", "accumulate")) for r in backward.regions())


class TestRegion:
    def test_names_are_checked_and_unique(self):
        with pytest.raises(RegionError, match="family.part"):
            region("norms")(lambda x: None)
        with pytest.raises(RegionError, match="defined twice"):
            region("norms.rms")(lambda x: None)

    def test_lookup_suggests(self):
        with pytest.raises(RegionError, match="norms.rms"):
            lookup("norms.rsm")

    def test_rows_must_be_operands(self):
        with pytest.raises(RegionError, match="no operands"):
            region("toy.rows", rows=("y",))(lambda x: None)
        assert "toy.rows" not in REGISTRY
        with pytest.raises(RegionError, match="adds to 'sum', which is no operand"):
            region("toy.adds", adds=("sum", 0))(lambda x: None)

    def test_missing_implementation_names_the_mend(self):
        def signature(x): ...

        toy = region("toy.empty")(signature)
        try:
            with pytest.raises(Unsupported, match="region.kernel"):
                toy.implementation("sm90")
        finally:
            from isojax.region import forget

            forget("toy.empty")

    def test_wrong_call_is_one_clear_error(self):
        with pytest.raises(RegionError, match="norms.rms"):
            lookup("norms.rms")(jnp.zeros((16, 8), jnp.bfloat16))

    def test_leaves_that_do_not_divide_are_refused(self):
        with pytest.raises(Unsupported, match="linear.row.*8 leaves"):
            lookup("linear.row")(jnp.ones((16, 36), jnp.bfloat16), jnp.ones((8, 36), jnp.bfloat16))


def test_only_gradients_that_nobody_else_reads_are_added_to_buffers():
    ct, x = X, spec("bf16", 16, 64)
    wgrad = lookup("linear.wgrad")
    plain = program.trace(lambda ct, x: wgrad(ct, x), ct, x, backward=True)
    made, added = program.accumulating(plain)
    assert added == (0,) and made.steps[0].params == {} and plain.steps[0].params == {"_absent": (2,)}
    assert made.inputs[:2] == plain.inputs and made.in_avals[2] == plain.out_avals[0]
    assert made.steps[0].ins == made.inputs and made.outputs == plain.outputs
    again = program.trace(lambda ct, x: (lambda w: (w, w.T))(wgrad(ct, x)), ct, x, backward=True)
    assert program.accumulating(again)[1] == ()
    into = program.trace(lambda ct, x, w: wgrad(ct, x, w), ct, x, plain.out_avals[0], backward=True)
    assert program.accumulating(into)[1] == (), "it has a buffer already"


def test_put_and_rows_are_one_equation_each():
    p = program.trace(lambda x, i: program.put(x, i, program.rows(x, i)), X, spec("i32", 4))
    assert [s.name for s in p.steps if s.kind == "move" and s.name in ("gather", "scatter")] == ["gather", "scatter"]


def test_a_reassociated_sum_changes_bits():
    """Negative control of everything that follows: the comparison sees one reassociation."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 1024)) * np.exp2(rng.integers(-12, 6, (64, 1024))), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((512, 1024)), jnp.bfloat16)
    eight, four = (np.asarray(lookup("linear.row")(x, w, leaves=n)).view(np.uint16) for n in (8, 4))
    assert (eight != four).any()
