"""What a region's definition promises: shapes stated by hand are those of the reference, and misfits are named."""

import jax
import jax.numpy as jnp
import pytest

from isojax.errors import RegionError
from isojax.pallas_kernels import linear, norms
from isojax.region import REGISTRY, load_shipped

load_shipped()
STATED = sorted(name for name, r in REGISTRY.items() if r.shape_rule is not None)
CALLS = [(name, i) for name in STATED for i in range(len(REGISTRY[name].canonical()))]


def shaped(x, dtype):
    floating = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.float32
    return jax.core.ShapedArray(x.shape, dtype if floating else x.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name, i", CALLS)
def test_stated_shapes_are_those_of_the_reference(name, i, dtype):
    region = REGISTRY[name]
    call = region.canonical()[i]
    args, statics = region.bind(call.args, call.statics)
    avals = tuple(shaped(a, dtype) for a in args)
    stated = region.out_avals(avals, statics)
    assert stated == region.traced_shapes(avals, tuple(statics.items()))
    assert len(stated) >= region.outputs


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
