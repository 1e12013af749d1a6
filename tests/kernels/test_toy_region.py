"""The tutorial's region: its kernel against its reference, its gate, and its artifact, as a user would check them."""

import numpy as np
import pytest

from examples import toy_region
from isojax import profile
from isojax.gates.case import ill_conditioned
from isojax.gates.run import run_gate
from isojax.types import spec
from tests.kernels.harness import compiles, interpret, ulps

EPS = dict(eps=1e-6)


@pytest.mark.parametrize("columns", [256, 512])
def test_kernel_in_the_interpreter(columns):
    rng = np.random.default_rng(0)
    args = ill_conditioned(rng, 4, columns), ill_conditioned(rng, columns)
    got, want = interpret(toy_region.mean_abs_norm, args, EPS), toy_region.reference(*args, **EPS)
    assert ulps(got[0], want[0]).max() <= 1  # the sum's order differs, and with it the last bit of the scale


def test_kernel_compiles_without_spills():
    compiles(toy_region.mean_abs_norm, (spec("bf16", 64, 512), spec("bf16", 512)), EPS)


def test_gate_and_artifact():
    assert all(r.passed for r in run_gate("toy.mean_abs_norm", "cpu", quick=True))
    assert len(profile.artifact("toy.mean_abs_norm", "sm90")) == 64
