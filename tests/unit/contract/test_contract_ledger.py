import json

import pytest

import contract as c
from contract.ledger import GENESIS


def filled(path=None) -> c.Ledger:
    ledger = c.Ledger(path)
    ledger.append("install", {"regions": [["norms.rms", "trainer_fwd"]], "degrees": {"tp": 2}})
    for _ in range(3):
        ledger.launch("norms.rms", "trainer_fwd", "aa")
    ledger.launch("norms.rms", "trainer_fwd", "bb")
    return ledger


def test_chain_and_counters():
    ledger = filled()
    assert [record.event for record in ledger.records] == ["install", "launch", "launch"]
    assert ledger.launches == {("norms.rms", "trainer_fwd", "aa"): 3, ("norms.rms", "trainer_fwd", "bb"): 1}
    assert c.verify(ledger.records) == ledger.head and c.Ledger().head == GENESIS


def test_equal_deeds_have_equal_heads():
    assert filled().head == filled().head
    other = filled()
    other.launch("norms.rms", "trainer_fwd", "cc")
    assert other.head != filled().head


def test_file_is_resumed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = filled(path)
    second = c.Ledger(path)
    assert second.records == first.records and second.launches == {}
    second.append("handshake", {})
    assert c.Ledger(path).head == second.head != first.head


@pytest.mark.parametrize("edit", ["change", "drop", "swap", "append", "cut", "newline", "noise", "list", "twice"])
def test_an_altered_file_is_refused(tmp_path, edit):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    lines = path.read_text().splitlines(keepends=True)
    record = json.loads(lines[1])
    lines = {
        "change": [lines[0], lines[1].replace('"aa"', '"cc"'), lines[2]],
        "drop": [lines[0], lines[2]],
        "swap": [lines[1], lines[0], lines[2]],
        "append": [*lines, json.dumps({**record, "seq": 3}) + "\n"],
        "cut": [*lines[:2], lines[2][:-5]],
        "newline": [*lines[:2], lines[2].rstrip()],
        "noise": [*lines, "{\n"],
        "list": [*lines, "[]\n"],
        "twice": [*lines, '{"seq": 3, "seq": 3}\n'],
    }[edit]
    path.write_text("".join(lines))
    with pytest.raises(c.ContractError, match="ledger.jsonl"):
        c.Ledger(path)


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    one, two = c.Ledger(path), c.Ledger(path)
    one.append("install", {})
    with pytest.raises(c.ContractError, match="another process"):
        two.append("install", {})
    assert two.records == () and len(c.Ledger(path).records) == 1


def test_a_chain_in_memory_shows_an_edit():
    records = list(filled().records)
    with pytest.raises(c.ContractError, match="record 1"):
        c.verify([records[0], records[2]])


def test_a_splice_of_two_sound_ledgers_shows():
    other = c.Ledger()
    for event in ("install", "refusal", "handshake"):
        other.append(event, {})
    with pytest.raises(c.ContractError, match="record 1"):
        c.verify([filled().records[0], *other.records[1:]])


def test_data_that_is_no_json_is_refused():
    ledger = c.Ledger()
    with pytest.raises(ValueError):
        ledger.append("install", {"x": object()})
    assert ledger.records == ()
