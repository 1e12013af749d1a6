"""What must be caught, each with its catcher. A check that cannot fail proves nothing."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import contract
from bridges.parity.compare import compare
from bridges.parity.record import Record, Sequence, bits, check_pair
from bridges.vllm.tap import digest
from isojax import profile, program
from isojax.errors import InputError, Refused
from isojax.gates.run import run_gate
from isojax.model import dense, weights
from isojax.pallas_kernels.linear import row
from isojax.runtime import Reference
from isojax.types import spec
from tests.integration import models


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(*_load(models.save("qwen3", tmp_path_factory.mktemp("qwen3"))))


def _load(folder):
    config, params = weights.load(folder)
    return config, weights.as_jax(params)


def record(reference, runtime, case, sequences, temperature=1.0):
    out = []
    rows, picked = reference.score(sequences, temperature), reference.logprobs(sequences, temperature)
    for s, r, p in zip(sequences, rows, picked, strict=True):
        out.append(Sequence(s[:2], s[2:], bits(p[1:]), [digest(x) for x in r[1:-1]]))
    return Record(runtime, "isojax", case, {"greedy": out})


def test_equal_runs_compare_equal(reference):
    """The comparison's own control: it does not cry wolf."""
    s = models.prompts(3)
    a, b = record(reference, "vllm", "engine", s), record(reference, "megatron", "trainer_fwd", s)
    assert all(r.equal for r in compare(a, b)) and sum(r.tokens for r in compare(a, b)) > 0


def test_wrong_temperature_is_caught_by_the_comparison(reference):
    s = models.prompts(3)
    a, b = record(reference, "vllm", "engine", s), record(reference, "megatron", "trainer_fwd", s, 0.7)
    assert all(r.differing > 0 and r.rows_differing == r.rows for r in compare(a, b))


def test_one_bit_is_caught_by_the_comparison(reference):
    s = models.prompts(2)
    a, b = record(reference, "vllm", "engine", s), record(reference, "megatron", "trainer_fwd", s)
    b.sequences["greedy"][1].logprob_bits[-1] ^= 1
    assert sum(r.differing for r in compare(a, b)) == 1


def test_other_leaves_on_one_side_are_caught_by_the_comparison(reference, monkeypatch):
    s = models.prompts(3)
    a = record(reference, "vllm", "engine", s)
    real = dense.linear.row
    layer: Any = dense._layer  # jax's type of a jitted function has no clear_cache
    monkeypatch.setattr(dense.linear, "row", lambda x, w: real(x, w, leaves=2))
    layer.clear_cache()
    try:
        b = record(reference, "megatron", "trainer_fwd", s)
    finally:
        layer.clear_cache()
    assert sum(r.rows_differing for r in compare(a, b)) > 0


def test_other_leaves_on_one_side_are_caught_by_the_contract(monkeypatch):
    held = profile.shipped("dense", "cpu")
    monkeypatch.setitem(row.constants, "leaves", 4)
    adapter = contract.Adapter("megatron", held, registry_view=profile.registry_view("cpu", profile.TRAINER))
    degrees = {"tp": 1, "sp": 0, "ep": 1, "cp": 1, "pp": 1, "dp": 1}
    with pytest.raises(contract.AdapterRefusal, match="linear.row.*leaves"):
        adapter.install(("trainer_fwd",), profile.TRAINER, degrees)


def test_a_sum_left_in_the_model_is_caught_by_the_tracer():
    def model(x, w):
        return jnp.sum(row(x, w).reshape(16, 4, -1), 1)

    with pytest.raises(Refused, match=r"test_negative_controls.py:\d+"):
        program.trace(model, spec("bf16", 16, 128), spec("bf16", 64, 128))


@pytest.mark.parametrize("name", ["linear.row", "norms.add_rms"])
def test_a_reassociation_and_a_moved_rounding_are_caught_by_the_gate(name):
    """run_gate raises GateBroken unless its altered implementation was caught."""
    results = run_gate(name, "cpu", quick=True)
    assert results and all(r.negative_control_caught and r.passed for r in results)


def test_a_runtime_is_not_compared_with_itself(reference):
    """Case 8 from the field: an engine rescored by the engine shows 0."""
    a = record(reference, "vllm", "engine", models.prompts(1))
    with pytest.raises(InputError, match="itself"):
        compare(a, a)
    trainer = record(reference, "megatron", "trainer_fwd", models.prompts(1))
    with pytest.raises(InputError, match="itself"):
        check_pair(trainer, trainer)


def test_only_the_gradient_carrying_forward_counts(reference):
    s = models.prompts(1)
    with pytest.raises(InputError, match="carries gradients"):
        compare(record(reference, "vllm", "engine", s), record(reference, "megatron", "trainer_score", s))


def test_different_tokens_are_not_compared(reference):
    a = record(reference, "vllm", "engine", models.prompts(1, seed=1))
    with pytest.raises(InputError, match="different tokens"):
        compare(a, record(reference, "megatron", "trainer_fwd", models.prompts(1, seed=2)))


def test_an_edited_contract_is_caught_by_its_identities(tmp_path):
    raw = json.loads(profile.path("dense", "cpu").read_text())
    raw["composition"][0]["impl"]["version"] = 99
    (tmp_path / "edited.json").write_text(json.dumps(raw))
    with pytest.raises(contract.ContractError):
        contract.load(tmp_path / "edited.json")


def test_rows_with_nan_and_negative_zero_are_compared_as_bits():
    a, b = np.array([0.0, np.nan], np.float32), np.array([-0.0, np.nan], np.float32)
    assert digest(a) != digest(b) and bits(a) != bits(b)
