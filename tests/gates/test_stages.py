"""`isojax gate --stage`: samples of every kernel, and stages that can fail. On CPU a stage compares cpu with itself."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from isojax import cli
from isojax.errors import RegionError
from isojax.gates import stages
from isojax.gates.calls import sample
from isojax.gates.case import GateResult
from isojax.region import REGISTRY, load_shipped

load_shipped()
FORWARD = {n for n, r in REGISTRY.items() if not r.is_backward and r.implementation("sm90").kind == "kernel"}


@pytest.fixture(scope="module")
def calls():
    return list(sample(np.random.default_rng(0)))


def test_every_forward_kernel_is_sampled_with_operands_that_it_takes(calls):
    assert FORWARD <= {c.region.name for c in calls}
    assert len({c.name for c in calls}) == len(calls)
    for c in calls:
        c.region.check("sm90", *c.region.bind(c.args, c.statics))


def test_only_what_is_asked_for():
    assert {c.region.name for c in sample(np.random.default_rng(0), ["mlp.swiglu"])} == {"mlp.swiglu"}
    with pytest.raises(RegionError, match="no region"):
        list(sample(np.random.default_rng(0), ["mlp.swigul"]))


def test_light_passes_and_can_fail(calls, monkeypatch):
    [call] = [c for c in calls if c.name == "rms 576"]
    near, twice = stages._light(call, "cpu")
    assert near.passed and twice.passed and near.checked == 192 * 577
    real = stages._jitted

    def broken(call, args, statics, where, count=[0]):  # noqa: B006
        count[0] += 1
        outs = real(call, args, statics, where)
        if count[0] == 2:  # another answer the second time
            outs[0] = outs[0].copy()
            outs[0][3, 5] += outs[0].dtype.type(2)
        return outs if count[0] < 3 else [(o * 1.1).astype(o.dtype) for o in outs]

    monkeypatch.setattr(stages, "_jitted", broken)
    near, twice = stages._light(call, "cpu")
    assert near.differing > 1000 and not near.passed
    assert twice.differing == 1 and "[3, 5]" in twice.detail


def test_an_output_that_no_shift_changes_is_no_control(calls):
    [call] = [c for c in calls if c.name == "residual"]
    zeros = call._replace(args=tuple(np.zeros_like(a) for a in call.args))
    assert not any(r.passed for r in stages._light(zeros, "cpu"))


def test_a_step_that_breaks_is_a_result():
    def broken():
        raise RegionError("no such thing")

    assert list(stages.fenced("x", broken)) == [GateResult("x", 0, 0, False, "RegionError: no such thing")]
    good = [GateResult("x", 1, 0, True)]
    assert list(stages.fenced("x", lambda: good)) == good


@pytest.mark.parametrize("args", [["--stage", "nonsense"], ["--stage", "light"], ["norms.rsm"]])
def test_command_refuses(args, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["isojax", "gate", *args])
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 2 and capsys.readouterr().err.startswith("isojax: ")
