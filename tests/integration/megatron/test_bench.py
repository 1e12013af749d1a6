"""`isojax bench trainer` in tiny form on CPU: both sides train the same, bits are compared, and the table says so."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
import typer

from bridges import bars
from bridges.megatron import flash, model
from bridges.megatron.bench import command, compare, parity, side
from bridges.megatron.bench.step import PHASES
from bridges.megatron.bench.workload import Workload, flops, lengths, micro_batches
from bridges.models import MODELS
from isojax.errors import InputError, IsoError
from isojax.model import weights

WORK = Workload("tiny", tokens=128, sequences=4, steps=1, warmup=1, parity=1)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found():
    return {name: side.measure(name, WORK, budget=True) for name in side.SIDES}


def test_both_sides_take_the_same_steps(found):
    """float32 here: forward and backward err by some 1e-6 of a value; the loss is of order one."""
    stock, ours = found["stock"]["losses"], found["isojax"]["losses"]
    assert len(stock) == len(ours) == 2 and np.abs(np.subtract(stock, ours)).max() < 2e-5
    for name in side.SIDES:
        assert set(found[name]["ms"]) == set(PHASES) and all(v > 0 for v in found[name]["ms"].values())
    assert found["isojax"]["compared"] > 10 and found["isojax"]["differing"] == 0


def test_the_table(found):
    gpu = {name: dict(found[name], device="NVIDIA H200", peak_gib=2.0, step_ms=1.0) for name in side.SIDES}
    gpu["isojax"] |= dict(step_ms=1.2, peak_gib=2.1)
    table = {row["what"]: row for row in compare.rows(gpu)}
    assert table["step"]["bar"] == "<= 1.10: MISSED" and table["step"]["ratio"] == "1.200"
    assert table["peak memory"]["bar"] == "<= 1.05: met"
    used = found["stock"]["flops"] / 1e-3 / compare.PEAK_FLOPS["H200"] * 100
    assert table["model FLOPs utilisation"]["stock"] == round(used, 2)
    assert table["mismatch with the engine"]["isojax"].startswith("0 of ")
    here = {row["what"]: row for row in compare.rows(found)}
    assert "peak memory" not in here and here["step"]["bar"] == "", "nothing that was measured on CPU is a claim"


def test_the_budget_has_every_region_of_our_step(found):
    assert "budget" not in found["stock"]
    rows = found["isojax"]["budget"]
    calls = {name: sum(r["calls a step"] for r in rows if r["region"] == name) for name in {r["region"] for r in rows}}
    layers = MODELS["tiny"].layers
    assert calls["attn.core"] == calls["attn.core_bwd"] == layers and calls["head.logprob"] == 1
    assert calls["linear.column"] == calls["linear.row"] == 2 * layers and calls["embed.lookup_bwd"] == 1
    assert all(r["us"] > 0 for r in rows) and rows == sorted(rows, key=lambda r: -r["ms a step"])


def test_strict_wants_bars_that_are_met(found):
    assert "no bar was judged" in bars.unmet(compare.rows(found))
    gpu = {name: dict(found[name], device="NVIDIA H200", peak_gib=2.0, step_ms=1.0) for name in side.SIDES}
    assert bars.unmet(compare.rows(gpu)) == ""
    gpu["isojax"] |= dict(step_ms=1.2)
    assert bars.unmet(compare.rows(gpu)) == "missed: step"
    bars.require(compare.rows(gpu), strict=False)
    with pytest.raises(typer.Exit):
        bars.require(compare.rows(gpu), strict=True)


def test_the_command_in_json_says_where_it_ran(found, monkeypatch, capsys):
    monkeypatch.setattr(compare, "run", lambda *_: found)
    command.trainer("tiny", steps=1, warmup=1, as_json=True)
    out = json.loads(capsys.readouterr().out)
    assert out["machine"]["versions"]["megatron-core"] and out["machine"]["date"] and "driver" in out["machine"]
    with pytest.raises(typer.Exit):
        command.trainer("tiny", strict=True)
    command.trainer("tiny", budget=True)
    assert "attn.core_bwd" in capsys.readouterr().out


def test_control_an_altered_weight_is_seen():
    config = WORK.config("float32")
    trainer = model.build(config, weights.random(config))
    batch = micro_batches(WORK, config.vocab, 1, CPU)[0]
    engine = parity.EngineForm(trainer, batch, 1)
    run = lambda: trainer.logprobs(batch.tokens, batch.labels, case="trainer_fwd", packed_seq_params=batch.packing)
    assert engine.differing(run())[1] == 0
    before = run()
    with torch.no_grad():
        trainer.get_parameter("decoder.layers.1.self_attention.linear_proj.weight").view(torch.int32)[3] ^= 1
    compared, wrong = engine.differing(before)
    assert 0 < wrong <= compared


def test_flash_model_masks_by_sequence():
    """The peer on packed rows says of a sequence what it says of it alone."""
    config = WORK.config("float32")
    peer = flash.flash_model(config, weights.random(config))
    batch = micro_batches(WORK, config.vocab, 1, CPU)[0]
    with torch.no_grad():
        packed = peer(batch.tokens, None, None, labels=batch.labels, packed_seq_params=batch.packing)[0]
        start = len(batch.sequences[0])
        stop = start + len(batch.sequences[1])
        from bridges.megatron.score import packed as pack

        tokens, labels, packing = pack(batch.sequences[1:2])
        alone = peer(tokens, None, None, labels=labels, packed_seq_params=packing)[0]
    assert torch.allclose(packed[start : stop - 1], alone[:-1], atol=1e-5)
    with pytest.raises(InputError, match="packed_seq_params"):
        peer(batch.tokens, None, None, labels=batch.labels)


def test_workload():
    lens = lengths(np.random.default_rng(0), 8192, 8)
    assert sum(lens) == 8192 and min(lens) >= 2 and max(lens) > 2 * min(lens)
    one, two = (micro_batches(WORK, 512, 2, CPU) for _ in range(2))
    assert torch.equal(one[1].tokens, two[1].tokens) and one[0].sequences != one[1].sequences
    c, batch = MODELS["tiny"], one[0]
    matmuls = c.layers * c.hidden * (c.qkv_width + c.heads * c.head_dim + 3 * c.intermediate) + c.vocab * c.hidden
    assert flops(c, batch) > 6 * 128 * matmuls
    with pytest.raises(InputError, match="tokens = 0; give at least 1"):
        Workload("tiny", tokens=0).config("float32")
    with pytest.raises(InputError, match="8 sequences in 9 tokens"):
        Workload("tiny", tokens=9).config("float32")
    with pytest.raises(InputError, match="3 layers of a model of 2"):
        Workload("tiny", layers=3).config("float32")


def test_a_side_that_fails_is_no_figure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(IsoError, match="stock ended with code 1"):
        compare.run(WORK)


def test_records_are_plain(found):
    assert json.loads(json.dumps(found)) == found
