import json
import os

import pytest
from contract_samples import native_sample, sample, unsealed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import contract as c
from contract import store

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused(path) -> c.ContractError:
    with pytest.raises(c.ContractError) as caught:
        c.load(path)
    assert str(path) in str(caught.value) or caught.value.rules
    return caught.value


@pytest.mark.parametrize("doc", [sample(), native_sample()], ids=["correctness", "performance"])
def test_round_trip(tmp_path, doc):
    path = tmp_path / "contract.json"
    c.save(doc, path)
    assert c.load(path) == doc
    first = path.read_bytes()
    c.save(c.load(str(path)), path)
    assert path.read_bytes() == first and os.listdir(tmp_path) == ["contract.json"]


def test_deployment_floats_keep_their_bits(tmp_path):
    doc = sample(deployment={"a": -0.0, "b": 5e-324, "c": 0.1, "d": 1e22, "e": [1.0, 1]})
    c.save(doc, tmp_path / "c.json")
    assert c.load(tmp_path / "c.json") == doc


def test_missing_file_and_folder_are_refused(tmp_path):
    assert refused(tmp_path / "none.json").rules == ("file",)
    assert refused(tmp_path).rules == ("file",)
    assert "none.json" in str(refused(tmp_path / "none.json"))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\x80", b"[" * 100_000, b'{"schema_version": 1}'])
def test_what_holds_no_contract_is_refused(tmp_path, data):
    path = tmp_path / "c.json"
    path.write_bytes(data)
    assert "c.json" in str(refused(path))


@pytest.mark.parametrize("depth", [100, 200, 300, 400, 600, 900])
def test_deep_nesting_is_loaded_or_refused_but_never_crashes(tmp_path, depth):
    path = tmp_path / "c.json"
    doc = {**sample().plain(), "deployment": 0}
    path.write_text(json.dumps(doc).replace('"deployment": 0', '"deployment": ' + '{"a":' * depth + "1" + "}" * depth))
    refused(path)


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None])
def test_other_schema_versions_are_refused(tmp_path, version):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**sample().plain(), "schema_version": version}))
    assert refused(path).rules == ("schema-version",)


def test_a_key_twice_is_refused(tmp_path):
    path = tmp_path / "c.json"
    c.save(sample(), path)
    path.write_text(
        path.read_text().replace('"arch": "cpu",\n  "cases"', '"arch": "cpu",\n  "arch": "cpu",\n  "cases"')
    )
    assert refused(path).rules == ("json",)


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


def other_value(value, data):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + data.draw(st.integers(1, 3))
    if isinstance(value, float):
        return value * 2
    if isinstance(value, str):
        at = data.draw(st.integers(0, max(len(value) - 1, 0)))
        return value[:at] + ("1" if value[at : at + 1] == "0" else "0") + value[at + 1 :]
    return "0" * 64


@quick
@given(st.data())
def test_an_edit_of_any_leaf_of_the_file_is_refused(tmp_path, data):
    path = tmp_path / "c.json"
    doc = data.draw(st.sampled_from([sample(), native_sample()])).plain()
    *parents, last = data.draw(st.sampled_from(leaves(doc)))
    place = doc
    for step in parents:
        place = place[step]
    place[last] = other_value(place[last], data)
    path.write_text(json.dumps(doc))
    refused(path)


def test_an_edit_names_the_identity_it_moved(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**sample().plain(), "deployment": {"tiles": 1}}))
    assert "identities deployment" in str(refused(path))


def test_save_refuses_an_invalid_contract_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "c.json"
    c.save(sample(), path)
    before = path.read_bytes()
    with pytest.raises(c.ContractError):
        c.save(unsealed(), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["c.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch, step):
    path = tmp_path / "c.json"
    c.save(sample(), path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(store.os, step, full)
    with pytest.raises(OSError, match="disk full"):
        c.save(native_sample(), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["c.json"]


def test_save_follows_a_link_and_keeps_usual_permissions(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    c.save(sample(), link)
    plain = tmp_path / "plain"
    plain.touch()
    assert link.is_symlink() and c.load(real) == sample()
    assert real.stat().st_mode == plain.stat().st_mode
