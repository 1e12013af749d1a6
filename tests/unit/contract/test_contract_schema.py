import copy
import pickle

import pytest
from contract_samples import constants, deployments, entry, sample, unsealed
from hypothesis import given
from pydantic import ValidationError

import contract as c


def test_package_is_framework_neutral():
    import subprocess
    import sys

    probe = "import sys, contract; print(sorted({'jax', 'torch', 'vllm', 'megatron', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_exported_name_exists():
    assert all(hasattr(c, name) for name in c.__all__)


def test_cases_are_the_five_of_the_project():
    assert sorted(c.CASES) == ["engine_decode", "engine_prefill", "jax_reference", "trainer_fwd", "trainer_score"]
    assert [id for id, case in c.CASES.items() if case.grad_mode == "grad"] == ["trainer_fwd"]
    assert {case.runtime_role for case in c.CASES.values()} == {"trainer", "engine", "reference"}


def test_document_is_immutable_down_to_the_constants():
    doc = sample()
    with pytest.raises(ValidationError):
        doc.name = "other"
    with pytest.raises(TypeError):
        doc.composition[-1].constants["row_tile"] = 1  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError):
        doc.deployment["linear.row"]["stages"] = 1
    assert isinstance(doc.deployment["linear.row"]["tiles"], tuple)


@pytest.mark.parametrize(
    "bad",
    [
        {"name": ""},
        {"arch": "sm100"},
        {"unknown": 1},
        {"schema_version": 2},
        {"composition": ({**entry("norms.rms").plain(), "region": "Norms.rms"},)},
        {"composition": ({**entry("norms.rms").plain(), "region": "norms"},)},
        {"composition": ({**entry("norms.rms").plain(), "cases": ["trainer"]},)},
        {"composition": ({**entry("norms.rms").plain(), "artifact": "abc"},)},
        {"composition": ({**entry("norms.rms").plain(), "artifact": "A" * 64},)},
        {"composition": ({**entry("norms.rms").plain(), "impl": {"id": "a", "version": True, "arch": "cpu"}},)},
        {"composition": ({**entry("norms.rms").plain(), "impl": {"id": "a", "version": 0, "arch": "cpu"}},)},
        {"composition": ({**entry("norms.rms").plain(), "discharge": {"kind": "gate", "ref": "  "}},)},
        {"composition": ({**entry("norms.rms").plain(), "discharge": {"kind": "hope", "ref": "x"}},)},
        {"composition": ({**entry("norms.rms").plain(), "constants": {"eps": 1e-6}},)},
        {"topology": ({"axis": "xp", "kind": "pinned", "degrees": (1,)},)},
        {"topology": ({"axis": "tp", "kind": "pinned", "degrees": (1.0,)},)},
        {"topology": ({"axis": "tp", "kind": "pinned", "degrees": (-1,)},)},
        {"toolchain": {"jax": 11}},
        {"toolchain": []},
        {"deployment": {"x": float("nan")}},
        {"identities": {"semantic": "0" * 64}},
    ],
)
def test_wrong_types_and_spellings_are_refused(bad):
    assert unsealed()  # the same document without `bad` is fine
    with pytest.raises(ValidationError):
        unsealed(**bad)


@pytest.mark.parametrize("value", [1e-6, {"a": 1}, [1, [2.0]], 2**53, "f64:0x1", object(), {1}, b"x"])
def test_constants_refuse(value):
    with pytest.raises(ValueError, match=r"^k\b"):
        c.Constants({"k": value})


@pytest.mark.parametrize("key", ["", 1, None])
def test_keys_are_non_empty_strings(key):
    with pytest.raises(ValueError, match="key"):
        c.FrozenMap({key: 1})


def test_constants_take_plain_values_and_bit_patterns():
    held = c.Constants.of({"eps": 1e-6, "n": 8, "on": True, "mode": "fp32", "window": None, "steps": [1, 0.5]})
    assert held["eps"] == c.encode_float(1e-6) and held["steps"] == (1, c.encode_float(0.5))
    assert c.Constants.of(held) == held


@pytest.mark.parametrize("one, other", [(1, True), (0, False), (1, "1"), (0, None), ((), None)])
def test_equality_is_by_bytes_not_by_python(one, other):
    assert c.FrozenMap({"k": one}) != c.FrozenMap({"k": other})
    assert c.FrozenMap({"k": one}) != {"k": other}
    assert c.FrozenMap({"k": one}) == {"k": one}


def test_signed_zeros_differ():
    assert c.FrozenMap({"k": 0.0}) != c.FrozenMap({"k": -0.0})
    assert c.Constants.of({"k": 0.0}) != c.Constants.of({"k": -0.0})


def test_comparison_with_what_is_no_json_is_just_unequal():
    assert c.FrozenMap({"k": 1}) != {"k": object()}
    assert c.FrozenMap({"k": 1}) != 1


@given(constants)
def test_constants_round_trip(values):
    held = c.Constants.of(values)
    assert c.Constants(held.plain()) == held
    assert hash(c.Constants(held.plain())) == hash(held)


@given(deployments)
def test_free_maps_copy_and_pickle(values):
    held = c.FrozenMap(values)
    assert copy.deepcopy(held) == held == pickle.loads(pickle.dumps(held))
    assert c.FrozenMap(held.plain()) == held


@pytest.mark.parametrize("bound", [-1.0, -0.0, float("inf"), float("nan")])
def test_bounds_are_finite_and_not_negative(bound):
    assert c.Bounds({"max": c.encode_float(0.0)})
    with pytest.raises(ValueError, match="max"):
        c.Bounds({"max": c.encode_float(bound)})
    with pytest.raises(ValueError, match="max"):
        c.Bounds({"max": bound})
    with pytest.raises(ValueError, match="max"):
        c.Bounds({"max": "f64:0x0"})


def test_evolve_checks_again():
    assert entry("norms.rms").evolve(region="norms.add_rms").region == "norms.add_rms"
    with pytest.raises(ValidationError):
        entry("norms.rms").evolve(region="norms")


def test_owner_finds_the_entry_of_a_case():
    doc = sample()
    held = doc.owner("linear.row", "engine_decode")
    assert held and "engine_decode" in held.cases
    assert doc.owner("head.sample", "trainer_fwd") is None
    assert doc.regions == ("head.logprob", "head.logprob_rows", "head.sample", "linear.row", "norms.rms")


def test_errors_name_everything_and_cross_process_boundaries():
    finding = c.Finding("entry", "rule", "given", "allowed", "mend")
    for kind in (c.ContractError, c.AdapterRefusal):
        error = kind([finding])
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and again.findings == (finding,) and str(again) == str(error)
        assert isinstance(error, ValueError)
        assert all(word in str(error) for word in ("entry", "rule", "given", "allowed", "mend"))
