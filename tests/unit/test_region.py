"""What a region's definition promises: shapes stated by hand are those of the reference, and misfits are named."""

import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray
from jaxtyping import Array, Float

from isojax.errors import RegionError, Unsupported
from isojax.pallas_kernels import attn, linear, mlp, norms
from isojax.region import REGISTRY, forget, load_shipped
from isojax.region import region as define

load_shipped()


def canonical(name):
    calls = REGISTRY[name].canonical
    assert calls is not None, f"{name} has no canonical calls"
    return calls()


STATED = sorted(name for name, r in REGISTRY.items() if r.shape_rule is not None)
CALLS = [(name, i) for name in STATED for i in range(len(canonical(name)))]


def shaped(x, dtype):
    floating = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float32
    return ShapedArray(x.shape, dtype if floating else x.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name, i", CALLS)
def test_stated_shapes_are_those_of_the_reference(name, i, dtype):
    region = REGISTRY[name]
    call = canonical(name)[i]
    args, statics = region.bind(call.args, call.statics)
    avals = tuple(shaped(a, dtype) for a in args)
    stated = region.out_avals(avals, statics)
    assert stated == region.traced_shapes(avals, tuple(statics.items()))
    assert len(stated) >= region.outputs


@pytest.mark.parametrize(
    "region, shapes, statics, said",
    [
        (attn.prep, [(64, 800), None, None, None, (9, 64), (64,)], dict(kv_heads=1, head_dim=64), "800 columns"),
        (attn.prep, [(64, 1024), None, None, None, (9, 64), (64,)], dict(kv_heads=3, head_dim=64), "multiple of 192"),
        (attn.prep, [(64, 128), None, None, None, (9, 64), (64,)], dict(kv_heads=1, head_dim=64), "three times"),
        (attn.prep, [(64, 256), None, None, None, (9, 32), (64,)], dict(kv_heads=1, head_dim=64), "rope"),
        (mlp.swiglu, [(64, 7)], {}, "7 columns"),
        (linear.row, [(64, 60), (16, 60)], {}, "K = 60"),
        (linear.column, [(4, 64), (16, 64)], {}, "4 rows"),
        (linear.column, [(0, 64), (16, 64)], {}, "0 rows"),
    ],
)
def test_a_stated_shape_is_none_for_operands_that_the_reference_refuses(region, shapes, statics, said):
    kinds = {"rope": "float32", "positions": "int32"}
    args = [
        None if s is None else jax.ShapeDtypeStruct(s, kinds.get(name, "bfloat16"))
        for name, s in zip(region.operands, shapes, strict=True)
    ]
    given = [a for a in args if a is not None]
    with pytest.raises((Unsupported, ValueError), match=said):
        jax.eval_shape(lambda *xs: called(region, args, xs, statics), *given)


def called(region, args, present, statics):
    left = iter(present)
    return region(*(None if a is None else next(left) for a in args), **statics)


@pytest.mark.parametrize("name", ["norms.add_rms", "residual.add", "linear.column"])
def test_stated_shapes_of_operands_of_two_kinds(name):
    region = REGISTRY[name]
    call = canonical(name)[0]
    args, statics = region.bind(call.args, call.statics)
    avals = tuple(ShapedArray(a.shape, "float32" if i else "bfloat16") for i, a in enumerate(args))
    assert region.out_avals(avals, statics) == region.traced_shapes(avals, tuple(statics.items()))


def test_every_region_of_an_engine_s_step_states_its_shapes():
    """Others would be traced for each of dozens of row counts at every start."""
    step = "embed.lookup norms.rms norms.add_rms linear.column linear.row attn.prep attn.core mlp.swiglu head.logits"
    assert {*step.split(), "head.logprob_rows"} <= set(STATED)


@pytest.mark.parametrize(
    "region, shapes, said",
    [
        (
            linear.column,
            [(4, 64), (8, 128)],
            "weight has shape (8, 128); it takes Float[Array, 'N K'], and K is 64 in x",
        ),
        (norms.add_rms, [(4, 64), (5, 64), (64,)], "delta has shape (5, 64); it takes Float[Array, 'T D'], and T is 4"),
        (linear.column, [(4, 64), (64,)], "weight has shape (64,); it takes 2 axes, Float[Array, 'N K']"),
    ],
)
def test_operands_that_do_not_fit_each_other_are_named(region, shapes, said):
    statics = {"eps": 1e-6} if region is norms.add_rms else {}
    with pytest.raises(RegionError) as found:
        region(*(jnp.ones(s, jnp.bfloat16) for s in shapes), **statics)
    assert f"region {region.name}: operand {said}" in str(found.value).replace('"', "'")


def test_axes_that_jaxtyping_leaves_unchecked_are_not_compared():
    @define("toy.unchecked")
    def unchecked(a: Float[Array, "T _"], b: Float[Array, "T _"], c: Float[Array, "R _n"], d: Float[Array, "R _n"]): ...

    try:
        shapes = (4, 3), (4, 5), (6, 1), (6, 2)
        args, _ = unchecked.bind(tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes), {})
        assert len(args) == 4
        with pytest.raises(RegionError, match="T is 4 in a"):
            unchecked.bind(tuple(jax.ShapeDtypeStruct(s, "float32") for s in ((4, 3), (5, 3), (6, 1), (6, 2))), {})
    finally:
        forget("toy.unchecked")
