"""Tuning tables: what is valid, what is found, and that nothing but speed can depend on one. No GPU is needed."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest

from isojax import tuning
from isojax.errors import InputError, RegionError, Unavailable
from isojax.lowering import canonical_asm, fingerprint
from isojax.pallas_kernels.linear.candidates import candidates
from isojax.pallas_kernels.linear.tiles import Tiles, misfit
from isojax.region import lookup
from isojax.tuning import search
from isojax.tuning.search import Found, Job, jobs, merge
from isojax.tuning.table import Choice, Entry, Shape, Table, TableError, dump, load

JOB = Job("linear.row", 64, 128, 8, 64)
SMALL = Tiles(64, 32, 16, (1, 1), split=2)


def entry(rows=64, tiles=SMALL, job=JOB, us=1.0):
    choice = Choice(**dataclasses.asdict(tiles))
    return Entry(region=job.region, shape=Shape(**job.shape), rows=rows, choice=choice, us=us, rule_us=2.0)


def made(*entries, device="NVIDIA H200"):
    return Table(device=device, made={"date": "2026-11-29"}, entries=entries)


def modules(job):
    return [hashlib.sha256(canonical_asm(op.module).encode()).hexdigest() for op in job.plan().launches()]


def test_a_table_survives_its_file(tmp_path):
    table = made(entry(), entry(rows=256, tiles=Tiles(64, 64, 16, (2, 1))))
    path = tmp_path / "t.json"
    path.write_text(dump(table))
    assert load(path, "NVIDIA H200") == table
    assert load(path).digest == table.digest != made(entry()).digest


@pytest.mark.parametrize(
    "change,says",
    (
        (lambda s: s[: len(s) // 2], "Invalid JSON"),
        (lambda s: s.replace('"us"', '"time"'), "Field required|Extra inputs"),
        (lambda s: s.replace('"k":16', '"k":17'), "no tile is 64 x 32 x 17"),
        (lambda s: s.replace('"k":128', '"k":120'), "does not divide a leaf"),
        (lambda s: s.replace('"split":2', '"split":16'), "no cluster"),
        (lambda s: s.replace('"split":2', '"split":4'), "no cluster"),  # no gate ever ran four
        (lambda s: s.replace('"split":2', '"cluster":4'), "no cluster"),
        (lambda s: s.replace("linear.row", "linear.rows"), "Input should be 'linear.column' or 'linear.row'"),
        (lambda s: s.replace('"n":64,"k":128', '"k":128'), "Field required"),
        (lambda s: s.replace('"leaves":8', '"leaves":8,"ranks":1'), "Extra inputs"),
        (lambda s: s.replace('"m":64', '"m":64.5'), "integer"),
        (lambda s: s.replace('"rows":64', '"rows":-1'), "greater than 0"),
        (lambda s: s.replace('"version":1', '"version":2'), "Input should be 1"),
        (lambda s: s.replace('{"region"', "\ufeff"), "Invalid JSON"),
    ),
)
def test_invalid_files_are_refused(tmp_path, change, says):
    text = dump(made(entry()))
    path = tmp_path / "t.json"
    path.write_text(change(text))
    assert path.read_text() != text
    with pytest.raises(TableError, match=f"{path}.*({says}).*isojax tune"):
        load(path)


def test_foreign_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(TableError, match="No such file"):
        load(path)
    path.write_text(dump(made(entry())))
    with pytest.raises(TableError, match="measured on 'NVIDIA H200', but this is 'NVIDIA A100'"):
        load(path, "NVIDIA A100")


def test_the_same_place_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        made(entry(), entry(us=1.5))


def test_lookup_is_exact():
    large = dataclasses.replace(SMALL, n=64)
    table = made(entry(rows=256, tiles=large), entry(rows=64))
    find = lambda rows, **shape: table.find("linear.row", rows, {**JOB.shape, **shape})
    assert find(64) == SMALL and find(256) == large and find(128) is None and find(9999) is None
    assert find(64, n=128) is None and find(64, leaves=4) is None
    assert table.find("linear.column", 64, JOB.shape) is None


def test_kernels_follow_the_table_and_contracts_do_not(monkeypatch):
    other = dataclasses.replace(JOB, n=128)  # which the table does not name
    rule, rule_of_other = modules(JOB), modules(other)
    region = lookup("linear.row")
    call = region.bind(JOB.avals, {})
    contracted = fingerprint(region, *call, "sm90")
    monkeypatch.setattr(tuning, "active", lambda: made(entry()))
    tuned = modules(JOB)
    assert tuned != rule
    with tuning.defaults():
        assert modules(JOB) == rule
    with tuning.forced(SMALL):
        assert modules(JOB) == tuned
    assert fingerprint(region, *call, "sm90") == contracted
    assert modules(other) == rule_of_other


def test_this_machine_is_known_or_has_no_table():
    assert (tuning.installed() is None) <= (tuning.active() is None)
    table = tuning.active()
    assert tuning.digest() == ("" if table is None else table.digest)


def test_shipped_tables_are_valid():
    for path in tuning.FOLDER.glob("*.json"):
        table = load(path)
        assert tuning.path(table.device) == path and table.entries
        for e in table.entries:  # `isojax tune` can find it again
            assert e.choice.tiles in candidates(e.rows, **dict(e.shape)), e


def test_jobs_cover_the_models_once():
    found = jobs(search.REGIONS)
    assert len(found) == len(set(found))
    assert Job("linear.row", 2048, 6144, 8, 64) in found  # Qwen3-1.7B down
    assert Job("linear.row", 8192, 1024, 1, 64) in found  # Llama-3-70B o: one leaf a rank
    assert jobs(search.REGIONS, "column .*K2048.* M64$") == [
        Job("linear.column", n, 2048, 1, 64) for n in (4096, 12288)
    ]
    with pytest.raises(RegionError, match="has nothing to tune"):
        jobs(["norms.rms"])
    with pytest.raises(RegionError, match="nothing to tune matches 'Qwen3'; names are as in 'linear.col"):
        jobs(search.REGIONS, "Qwen3")
    with pytest.raises(InputError, match="no regular expression"):
        jobs(search.REGIONS, "(")


def test_candidates_fit_and_are_distinct():
    for job in jobs(search.REGIONS):
        found = candidates(job.rows, **job.shape)
        assert len(found) == len(set(found)) > 1, job
        assert not [t for t in found if misfit(t, **job.shape)]


def found(**kw):
    return Found(**{**dict(job=JOB, times={"rule": 2.0}, refused=(), skipped={}, entry=None), **kw})


def test_only_gated_and_faster_tiles_are_kept():
    other = entry(rows=256)
    assert merge("NVIDIA H200", made(entry(), other), [found()]).entries == (other,)  # the rule won now
    assert merge("NVIDIA H200", made(other), [found(entry=entry())]).entries == (entry(), other)


def test_a_job_that_fails_costs_only_itself():
    old = made(entry(), other := entry(rows=256))
    assert merge("NVIDIA H200", old, [found(error="no GPU")]).entries == (entry(), other)  # not measured now
    refused = found(refused=("64x64x16",), entry=entry(us=0.5))
    assert "bits of 64x64x16" in refused.failure
    assert merge("NVIDIA H200", old, [refused]).entries == (other,)  # neither the new entry nor the old one


def test_a_process_that_dies_is_a_failed_job(monkeypatch, tmp_path):
    """A worker that ends breaks the pool: jobs that were done are kept, the others say why they were not."""
    from concurrent.futures import Future

    class Pool:
        def __init__(self, *_, **__):
            self.first = True

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def shutdown(self, **_):
            pass

        def submit(self, fn, job, lock):
            future = Future()
            future.set_result(found(job=job)) if self.first else future.set_exception(RuntimeError("pool broke"))
            self.first = False
            return future

    monkeypatch.setattr(search, "ProcessPoolExecutor", Pool)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    lost = dataclasses.replace(JOB, rows=256)
    done = {f.job: f.failure for f in search.tune([JOB, lost], 1, tmp_path / "lock")}
    assert done == {JOB: "", lost: "RuntimeError: pool broke"}


def test_a_table_is_written_for_one_known_device(tmp_path, monkeypatch):
    out = tmp_path / "t.json"
    monkeypatch.setattr(tuning, "installed", lambda: None)
    with pytest.raises(Unavailable, match="one kind of GPU"):
        search.write([found()], out)
    monkeypatch.setattr(tuning, "installed", lambda: "NVIDIA H200")
    assert load(search.write([found(entry=entry())], out)).entries == (entry(),)
    with pytest.raises(TableError, match="nothing was written.*M64: boom"):
        search.write([found(error="boom")], out)
    failed = [found(error="boom", job=dataclasses.replace(JOB, rows=256)), found(entry=entry())]
    assert load(search.write(failed, out)).entries == (entry(),)


def test_the_command_names_what_failed(tmp_path, monkeypatch, capsys):
    from isojax import cli, doctor

    lost = found(error="boom", job=dataclasses.replace(JOB, rows=256))
    monkeypatch.setattr(doctor, "require_sm90", lambda *_: None)
    monkeypatch.setattr(tuning, "installed", lambda: "NVIDIA H200")
    monkeypatch.setattr(search, "tune", lambda *_: iter([found(entry=entry()), lost]))
    monkeypatch.setattr("sys.argv", ["isojax", "tune", "--out", str(tmp_path / "t.json")])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert f"not written: {lost.job.name}: boom" in capsys.readouterr().err
    assert load(tmp_path / "t.json").entries == (entry(),)


def test_ctrl_c_writes_what_was_measured(tmp_path, monkeypatch, capsys):
    from isojax import cli, doctor

    def interrupted(*_):
        yield found(entry=entry())
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "require_sm90", lambda *_: None)
    monkeypatch.setattr(tuning, "installed", lambda: "NVIDIA H200")
    monkeypatch.setattr(search, "tune", interrupted)
    monkeypatch.setattr("sys.argv", ["isojax", "tune", "linear.column", "--out", str(tmp_path / "t.json")])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert load(tmp_path / "t.json").entries == (entry(),)
    assert "interrupted: 1 of " in capsys.readouterr().err


def test_what_could_not_be_written_is_refused_before_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "installed", lambda: None)
    with pytest.raises(Unavailable, match="one kind of GPU"):
        search.check(None)
    monkeypatch.setattr(tuning, "installed", lambda: "NVIDIA H200")
    search.check(None)  # the first table of its kind
    with pytest.raises(InputError, match="no folder"):
        search.check(tmp_path / "no" / "t.json")
    shipped = tuning.path("NVIDIA H200")
    shipped.write_text("{")
    with pytest.raises(TableError, match="restore it, or delete it"):
        search.check(None)
    search.check(tmp_path / "t.json")  # which does not keep the shipped entries
    other = entry(rows=256)
    shipped.write_text(dump(made(other)))
    assert search.write([found(entry=entry())], None) == shipped
    assert load(shipped).entries == (entry(), other)  # as another process had left it on disk, not as first read


def test_the_gates_data_shows_every_order():
    """Reordered products give another sum, in NumPy's fp32 too; the same order gives the same."""
    import torch

    for job in (JOB, Job("linear.column", 64, 128, 1, 64)):
        operands = search.cancelling(torch, job, torch.device("cpu"))

        def run(*xs, leaves=job.leaves):
            x, w = (a.float().numpy() for a in xs)
            parts = np.stack([a @ b.T for a, b in zip(np.split(x, leaves, 1), np.split(w, leaves, 1), strict=True)])
            while len(parts) > 1:
                parts = parts[::2] + parts[1::2]
            return (torch.from_numpy(parts[0].copy()).to(torch.bfloat16),)

        want = run(*operands)[0]
        assert search.differing(torch, run, operands, want) == 0
        assert search.differing(torch, run, search.reordered(*operands), want) > want.numel() // 100


class Fake:
    """Stands for the launcher: computes what the tiles say, wrongly where `wrong` says so."""

    wrong: set[Tiles] = set()
    deaf = False  # its sum does not depend on the order: the gate's control must notice
    tiles: Tiles | None = None

    def __init__(self, plan, device):
        self.bad = plan in Fake.wrong

    def __call__(self, x, w):
        leaves = 4 if self.bad else 8
        if Fake.deaf:
            return ((x.double() @ w.double().T).to(x.dtype),)
        total = [(a.float() @ b.float().T) for a, b in zip(x.chunk(leaves, 1), w.chunk(leaves, 1), strict=True)]
        while len(total) > 1:
            total = [a + b for a, b in zip(total[::2], total[1::2], strict=True)]
        return (total[0].to(x.dtype),)


@pytest.fixture
def searched(monkeypatch, tmp_path):
    """search() of JOB without a GPU: fake launchers, and times by the order of candidates."""
    import importlib

    monkeypatch.setattr(importlib.import_module("bridges.torch_ops.cuda"), "Launcher", Fake)
    monkeypatch.setattr(Fake, "wrong", set())
    monkeypatch.setattr(search, "DEVICE", "cpu")
    monkeypatch.setattr(search, "candidates", lambda rows, **shape: [JOB.rule, Tiles(64, 64, 16, (1, 1)), SMALL])
    monkeypatch.setattr(Job, "plan", lambda job: tuning.choose(job.region, job.rows, job.shape, lambda: job.rule))
    monkeypatch.setattr(search, "_times", lambda torch, device, job, runs: [10.0 - i for i in range(len(runs))])
    return lambda: search.search(JOB, tmp_path / "lock")


def test_the_fastest_candidate_with_the_rules_bits_is_taken(searched):
    found = searched()
    assert not found.refused and found.entry is not None and found.entry.choice.tiles == SMALL
    assert len(found.times) == 3  # the rule's own tiles are no candidate


def test_a_candidate_with_other_bits_is_refused_and_nothing_of_its_job_is_kept(searched):
    Fake.wrong.add(SMALL)
    found = searched()
    assert found.refused == (search.label(SMALL),)
    assert found.entry is None or found.entry.choice.tiles != SMALL
    assert "bits of" in found.failure and not merge("NVIDIA H200", None, [found]).entries


def test_a_gate_that_misses_another_order_is_broken(searched, monkeypatch):
    monkeypatch.setattr(Fake, "deaf", True)
    with pytest.raises(TableError, match="gate is broken"):
        searched()
