"""`isojax bench engine` without its engines: workloads, the table, failures. Real engines: benchmarks on a GPU."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from bridges.vllm.bench import compare
from bridges.vllm.bench.command import engine
from bridges.vllm.bench.workload import Workload
from isojax.errors import InputError, IsoError


def test_a_workload_is_the_same_in_every_process(tmp_path):
    work = Workload("tiny", steps=((2, 8),), requests=5, engine={"block_size": 16})
    work.save(tmp_path / "w.json")
    again = Workload.load(tmp_path / "w.json")
    assert again == work and again.prompts(2, 8, 3) == work.prompts(2, 8, 3)
    assert work.prompts(2, 8, 3) != work.prompts(2, 8, 4)  # nothing is found in the prefix cache
    (first, new), (second, same) = work.batch(0), work.batch(1)
    assert new == same and list(map(len, first)) == list(map(len, second)) and first != second
    assert all(0 <= t < work.vocab for p in first for t in p)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (Workload("qwen4"), "unknown"),
        (Workload("tiny", steps=(), requests=0), "nothing to measure"),
        (Workload("tiny", context=100), "context"),
    ],
)
def test_a_workload_that_measures_nothing_is_refused(work, why):
    with pytest.raises(InputError, match=why):
        work.validated()


def side(name: str, step: float, tokens: float) -> dict:
    steps = [dict(sequences=1, prompt=128, prefill_ms=4.0, step_ms=step)]
    batch = dict(requests=8, tokens=800, s=800 / tokens, tokens_per_s=tokens)
    memory = dict(kv_cache=0.0, weights=100.0, activation=10.0, reserved=0.0)
    return dict(side=name, steps=steps, batch=batch, start_s=20.0, memory=memory)


def test_ratios_are_our_time_over_stocks():
    table = compare.rows(dict(stock=side("stock", 2.0, 1000), isojax=side("isojax", 3.0, 500)))
    by = {row["what"]: row["ratio"] for row in table}
    assert by["decode step, 1 x 128, ms"] == 1.5 and by["8 requests, tokens/s"] == 2.0
    assert by["weights and activations, MiB"] == 1.0


def test_a_process_that_fails_shows_the_end_of_its_log(tmp_path):
    with pytest.raises(IsoError, match="(?s)stock ended with code 1.*No module named"):
        compare._process(tmp_path, "stock", ["bridges.vllm.bench.nowhere"], {})


def test_bad_pairs_are_one_sentence():
    import typer

    app = typer.Typer()
    app.command()(engine)
    result = CliRunner().invoke(app, ["--steps", "1-128"])
    assert isinstance(result.exception, InputError) and "1x128" in str(result.exception)
