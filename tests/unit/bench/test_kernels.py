"""Choosing, lowering and measuring cases, as far as a machine without a GPU can show."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from isojax.bench import kernels
from isojax.bench.bars import BARS, covering
from isojax.bench.compile import Job, prepare
from isojax.bench.result import Machine, Row
from isojax.bench.sections import sections
from isojax.errors import InputError, RegionError, Unavailable
from isojax.gates import bench
from isojax.gates.bench import (
    BenchCase,
    BenchResult,
    Empty,
    FarFromPeer,
    Operand,
    Peer,
    Stopwatch,
    Timing,
    by_rounds,
    copier,
    distance,
    measure_case,
)
from isojax.gates.shapes import MODELS, decodes, distinct, padded
from isojax.region import lookup


def place(region, case):
    return Row(region=region.name, case=case.name, model=case.model, part=case.part, at=dict(case.at), us=1.0)


def test_choose():
    every = kernels.choose()
    assert {"linear.column", "attn.core", "norms.rms", "head.logprob"} <= {r.name for r, _ in every}
    some = kernels.choose(["norms.rms"], "8B M64 ")
    assert [f"{r.name}/{c.name}" for r, c in some] == ["norms.rms/Qwen3-8B M64 D4096"]
    with pytest.raises(RegionError, match="matches 'nothing'"):
        kernels.choose([], "nothing")
    with pytest.raises(RegionError, match="no region"):
        kernels.choose(["norms.rsm"])


def test_cases_that_no_report_can_hold_are_refused_before_they_are_measured(monkeypatch):
    region, plain = lookup("norms.rms"), BenchCase("a", (), bytes=1, at={"M": 64})
    monkeypatch.setattr(region, "bench", lambda: [plain, plain])
    with pytest.raises(RegionError, match="two bench cases are norms.rms/a"):
        kernels.choose(["norms.rms"])
    monkeypatch.setattr(region, "bench", lambda: [plain, dataclasses.replace(plain, name="b")])
    with pytest.raises(InputError, match="norms.rms/a and norms.rms/b are one place"):
        kernels.choose(["norms.rms"])
    for wrong in (dict(bytes=0), dict(flops=-1), dict(at={"M": 0})):
        with pytest.raises(RegionError, match="bench case 'a': given"):
            dataclasses.replace(plain, **wrong)


def test_cases_have_a_place_of_their_own():
    """No two cases of a region fall on one point of a plot; sections refuses that."""
    sections([place(r, c) for r, c in kernels.choose()])


def test_every_bar_of_a_benched_region_has_cases():
    """A bar whose cases carry no `at` would never be judged."""
    chosen = kernels.choose()
    benched = {r.name for r, _ in chosen}
    judged = {b.title for r, c in chosen if (b := covering(place(r, c))) is not None}
    assert {b.title for b in BARS if set(b.regions) <= benched} <= judged


def test_random_data_only():
    """Floats are drawn: zeros would draw less power and run faster. What is given is a list of indices or ones."""
    for region, case in kernels.choose():
        drawn = [o for o in case.operands if o is not None and o.values is None]
        assert drawn and all(o.values is None for o in case.operands if o is not None and o.dtype == "bf16"), region


def test_shapes():
    assert [m.qkv for m in MODELS] == [4096, 6144, 6144, 1280]
    assert [m.row[1][2] for m in MODELS] == [6144, 12288, 11008, 3584]
    assert [m.hidden for m in distinct("hidden")] == [2048, 4096, 8192]
    assert [padded(n) for n in (1, 64, 65)] == [64, 64, 128]
    assert max(s * c for s, c in decodes()) <= 1 << 20 and (1, 32768) in decodes() and (256, 4096) in decodes()


@pytest.mark.slow
def test_lowering_in_workers_reports_failures_one_by_one():
    """Two processes import JAX: some seconds."""
    [(region, case)] = kernels.choose(["norms.rms"], "Qwen3-8B M64 ")
    jobs = [Job(region.name, case.name), Job(region.name, "no such case")]

    def load(plan):
        return len(plan.launches())

    found = {ready.job: ready for ready in prepare(jobs, load, workers=1)}
    assert found[jobs[0]].loaded == 1 and not found[jobs[0]].error
    assert "KeyError" in found[jobs[1]].error

    def refuse(plan):
        raise Unavailable("no such device")

    [ready] = prepare(jobs[:1], refuse, workers=1)
    assert ready.loaded is None and ready.error == "Unavailable: no such device"


class Watch:
    """A stopwatch without a GPU: it runs things and makes up times."""

    torch, device = torch, "cpu"

    def memory(self, fn):
        return 7, fn()

    def among(self, *fns):
        return [Timing(10.0 * (i + 1), 0.0, 30, 1 / (i + 1)) for i, fn in enumerate(fns) if fn() is not None]


CASE = BenchCase(
    "tiny", (Operand("bf16", (64, 32)), None), bytes=400, flops=100, peer=lambda torch, x, _: lambda: (x[:50] * 2,)
)


def test_measure_case():
    region = lookup("norms.rms")
    found = measure_case(region, CASE, lambda x: (x * 2, x[:, 0]), Watch(), 100.0, 10.0)  # pyright: ignore
    assert (found.us, found.peer_us, found.speedup) == (10.0, 20.0, 2.0)
    assert (found.bytes_us, found.flops_us, found.floor_us, found.efficiency) == (4.0, 10.0, 10.0, 1.0)
    assert found.distance == 0.0 and found.memory == found.peer_memory == 7
    named = dataclasses.replace(CASE, peer=lambda torch, x, _: Peer("cuBLAS", lambda: x[:50] * 2))
    assert measure_case(region, named, lambda x: (x * 2,), Watch(), 1.0, 1.0).against == "cuBLAS"  # pyright: ignore
    assert found.against == "torch"
    alone = measure_case(region, dataclasses.replace(CASE, peer=None), lambda x: (x,), Watch(), 1.0, 1.0)  # pyright: ignore
    assert alone.peer_us is None and alone.speedup is None


@pytest.mark.parametrize("peer", [None, CASE.peer])
def test_a_case_without_flops_is_timed_beside_a_copy_of_as_many_bytes(peer, monkeypatch):
    moved = []
    monkeypatch.setattr(bench, "copier", lambda torch, device, n: lambda: moved.append(n) or torch.zeros(1))
    case = dataclasses.replace(CASE, flops=0, peer=peer)
    found = measure_case(lookup("norms.rms"), case, lambda x: (x * 2,), Watch(), 100.0, 10.0)  # pyright: ignore
    assert set(moved) == {400} and found.copy and found.copy.us == (20.0 if peer is None else 30.0)
    assert found.peer_us == (None if peer is None else 20.0)
    busy = dataclasses.replace(case, flops=1)
    assert measure_case(lookup("norms.rms"), busy, lambda x: (x * 2,), Watch(), 100.0, 10.0).copy is None  # pyright: ignore


def test_copier_moves_what_is_asked():
    assert copier(torch, "cpu", 400)().numel() == 200


@pytest.mark.parametrize("wrong", [lambda x: (x * 2.1,), lambda x: (x * torch.nan,), lambda x: (x.flip(0) * 2,)])
def test_a_wrong_kernel_is_not_timed(wrong):
    with pytest.raises(FarFromPeer, match="norms.rms/tiny"):
        measure_case(lookup("norms.rms"), CASE, wrong, Watch(), 1.0, 1.0)  # pyright: ignore


@pytest.mark.parametrize("case", [dict(peer=None), dict(comparable=False)])
def test_a_kernel_that_is_compared_with_nothing_has_to_compute_something(case):
    case, region = dataclasses.replace(CASE, **case), lookup("norms.rms")
    measure_case(region, case, lambda x: (x, x.int()), Watch(), 1.0, 1.0)  # pyright: ignore
    for run, why in (
        (lambda x: (x, x * torch.nan), "output 1 holds NaN"),
        (lambda x: (torch.zeros_like(x),), "output 0 is all zero"),
    ):
        with pytest.raises(Empty, match=f"norms.rms/tiny: {why}"):
            measure_case(region, case, run, Watch(), 1.0, 1.0)  # pyright: ignore


def test_distance():
    x = torch.randn(8, 4)
    assert distance(torch, (x, x), x) == 0.0
    assert distance(torch, (x,), x[:5]) == 0.0  # ours has rows of padding
    assert distance(torch, (x.flatten(),), x) == 0.0
    assert distance(torch, (x, 2 * x), (x, x)) == pytest.approx(1.0)
    with pytest.raises(RegionError, match="comparable=False"):
        distance(torch, (x,), torch.cat([x, x]))
    for other in ((), (x, x)):  # nothing to compare, or nothing to compare it with
        with pytest.raises(RegionError, match=f"the peer has {len(other)} outputs, ours 1"):
            distance(torch, (x,), other)


def test_times_by_rounds():
    spread: Any = pytest.approx(2 / 3)
    assert by_rounds([[n] for n in (1.0, 2.0, 3.0, 4.0, 5.0)]) == [Timing(3.0, spread, 5, 1.0)]
    clocks = (1.0, 1.0, 1.0, 1.2, 1.2, 1.2)  # of two kinds, and a round in which they changed
    ours, peer = by_rounds([[10 * c, 9 * c] for c in clocks] + [[10.0, 9 * 1.2]])
    assert ours.us == 10.0 and peer.us == pytest.approx(9 * 1.2)  # medians of different clocks
    assert peer.ratio == pytest.approx(10 / 9) and ours.ratio == 1.0


def test_run_keeps_what_it_has_and_stops_at_a_lost_gpu(monkeypatch):
    """With the parts that need a GPU replaced: a case that fails costs itself, a lost GPU the rest."""
    chosen = kernels.choose(["norms.rms"])[:6]
    names = [f"{r.name}/{c.name}" for r, c in chosen]
    jobs = [Job(r.name, c.name) for r, c in chosen]

    def measured(region, case, *_):
        at = names.index(f"{region.name}/{case.name}")
        if at == 2:
            raise FarFromPeer("far")
        if at == 4:
            raise RuntimeError("CUDA error: an illegal memory access")
        return BenchResult(case.name, Timing(2.0, 0.1, 30, 1.0), None, 1.0, 0.5)

    machine = Machine(gpu="x", driver="", cuda="", date="", versions={}, copy_bytes_per_us=1.0, matmul_flops_per_us=1.0)
    monkeypatch.setattr(kernels, "KEEP_EVERY", 2)
    monkeypatch.setattr(kernels, "loader", lambda device: None)
    monkeypatch.setattr(kernels, "compiled", lambda *_: (dict.fromkeys(jobs[1:]), {jobs[0]: "Unsupported: no"}))
    monkeypatch.setattr(kernels, "Stopwatch", lambda *_: None)
    monkeypatch.setattr(kernels, "rates", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(kernels, "measure_case", measured)
    monkeypatch.setattr(kernels.machine, "describe", lambda *_: machine)
    kept, seen = [], []
    report = kernels.run(chosen, "cuda", lambda *p: seen.append(p), keep=kept.append)
    assert [r.name for r in report.rows] == names
    errors = [r.error for r in report.rows]
    assert errors[:3] == ["Unsupported: no", "", "FarFromPeer: far"] and "illegal memory" in errors[4]
    assert "not run" in errors[5] and names[4] in errors[5]
    assert report.rows[1].us == 2.0 and report.rows[1].bandwidth == 0.5 and report.rows[2].us is None
    assert [len(k.rows) for k in kept] == [2, 4, 6] and seen[-1] == ("measure", 6, 6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it exists")
def test_a_stopwatch_needs_a_gpu():
    with pytest.raises(Unavailable, match="CUDA"):
        Stopwatch(torch, "cuda")
