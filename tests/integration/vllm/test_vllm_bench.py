"""`isojax bench engine` without its engines: workloads, the table, failures. Real engines: benchmarks on a GPU."""

from __future__ import annotations

import inspect
import json
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from bridges import bars, process, shown
from bridges.vllm.bench import compare, steps
from bridges.vllm.bench.command import engine
from bridges.vllm.bench.workload import Workload, checkpoint
from isojax.errors import InputError, IsoError
from isojax.model.config import load_config


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
        (Workload("tiny", steps=(), context=1279), "requests of 1280 tokens"),
        (Workload("tiny", steps=(), requests=0, check=0, context=1), "nothing to measure"),
        (
            Workload("tiny", steps=((1, 1),), requests=0, decode=2, context=315),
            "requests of 316 tokens",
        ),  # of the check
        (Workload("tiny", steps=((0, 8),)), "0x8"),
        (Workload("tiny", steps=((257, 8),)), "1 to 256 sequences"),  # the rest would wait, and be timed as steps
        (Workload("tiny", steps=((1, 0),)), "1x0"),
        (Workload("tiny", decode=1), "at least 2"),
        (Workload("tiny", check=5), "give 0 to 4"),
        (Workload("tiny", layers=3), "3 layers"),
        (Workload("tiny", utilization=0.0), "share of 0.0"),
        (Workload("tiny", utilization=0.6), "two engines"),
    ],
)
def test_a_workload_that_measures_nothing_is_refused(work, why):
    with pytest.raises(InputError, match=why):
        work.validated()


class _Worker:
    def execute_model(self, scheduled: object) -> object:
        return scheduled


def test_a_decode_step_lasts_until_the_next_one_begins(monkeypatch):
    clock = iter([0, 5, 9, 10, 11, 12, 13, 20, 24])
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(clock))
    worker = _Worker()
    steps.watch(worker)
    for tokens in (512, 130, 4, 4, 4, 4, 4, 3, 4):  # prompts, prompts with decodes, all four decode, one has ended
        scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
        assert worker.execute_model(scheduled) is scheduled
    begun = steps.seen(worker)
    assert "execute_model" not in vars(worker)
    assert steps.periods(begun, 4, window=2) == [1.0, 1.0]  # 9 to 11, 11 to 13
    assert steps.periods(begun, 4, window=3) == [1.0]  # a rest of one step is no window
    assert steps.periods(begun, 4) == [1.0]  # fewer steps than a window: one of them all
    assert steps.periods(begun, 5) == [] and steps.periods([], 4) == []
    assert steps.periods([(0.0, 1), (1.0, 1), (3.0, 1)], 1) == [2.0]  # the first one was the prompt


class _Engine:
    """A side whose steps all take `factor` times what the host's drift makes of them."""

    def __init__(self, name: str, factor: float, asked: list):
        self.name, self.factor, self.asked = name, factor, asked

    def ask(self, what: str, *args: int) -> object:
        self.asked.append((self.name, what))
        drift = 1 + len(self.asked) / 100
        s = self.factor * drift
        return dict(prefill=s, decode=[s, s]) if what == "step" else s


def test_engines_are_timed_in_turns_so_that_a_drift_of_the_host_cancels():
    asked: list = []
    engines = {"stock": _Engine("stock", 2.0, asked), "isojax": _Engine("isojax", 1.0, asked)}
    work, said = Workload("tiny", steps=((1, 8), (4, 8)), requests=3), list[str]()
    found = compare.measure(engines, work, said.append)
    # what a run leaves that is cut off later
    found_so_far = r"stock [\d.]+ ms, ours [\d.]+ ms, ratio 0\.\d+ \(0\.\d+ to 0\.\d+\)"
    assert re.fullmatch(f"decode step, 1 x 8: {found_so_far}", said[1])
    assert re.fullmatch(f"prompts and first token, 1 x 8: {found_so_far}", said[2])
    turns = [name for name, what in asked if what == "step"]
    assert len(turns) == 2 * 2 * compare.SURE[0]  # a drift alone leaves no doubt about the ratio
    assert all({a, b} == {"stock", "isojax"} for a, b in zip(turns[::2], turns[1::2], strict=True))
    assert turns[:4] == ["isojax", "stock", "stock", "isojax"]  # and neither always comes first
    for stock, ours in zip(found["stock"]["steps"], found["isojax"]["steps"], strict=True):
        assert stock["repeats"] == compare.SURE[0] and (stock["sequences"], stock["prompt"]) in work.steps
        assert ours["step_ms"] / stock["step_ms"] == pytest.approx(0.5, abs=0.01)
        assert ours["prefill_ms"] / stock["prefill_ms"] == pytest.approx(0.5, abs=0.01)
        assert len(ours["step_turns_ms"]) == len(stock["prefill_turns_ms"]) == compare.SURE[0]
        assert compare.by_turns(stock["step_turns_ms"], ours["step_turns_ms"]) == pytest.approx((0.5,) * 3, abs=0.01)
    assert found["isojax"]["batch"]["tokens"] == sum(work.batch(0)[1])


def test_turns_go_on_while_a_ratio_is_in_doubt(monkeypatch):
    noise = np.random.default_rng(0)
    noisy = lambda s: dict(prefill=s, decode=[s * noise.uniform(1, 1.5)])
    ask = lambda s: SimpleNamespace(ask=lambda what, *_: noisy(s) if what == "step" else s)
    work = Workload("tiny", steps=((4, 8),), requests=0)
    found = compare.measure({"stock": ask(1.0), "isojax": ask(0.9)}, work, lambda _: None)
    [stock], [ours] = found["stock"]["steps"], found["isojax"]["steps"]
    assert compare.SURE[0] < stock["repeats"] <= compare.TURNS[1]
    low, ratio, high = compare.by_turns(stock["step_turns_ms"], ours["step_turns_ms"])
    assert low < ratio < high and low < 0.9 < high
    far = compare.measure({"stock": ask(1.0), "isojax": ask(0.4)}, work, lambda _: None)
    assert far["stock"]["steps"][0]["repeats"] == compare.SURE[0]  # 0.6 at most, whatever the noise
    far = compare.measure({"stock": ask(1.0), "isojax": ask(2.0)}, work, lambda _: None)
    assert far["stock"]["steps"][0]["repeats"] == compare.SURE[0]  # 1.33 at least
    monkeypatch.setattr(compare, "MOST_S", 0.0)  # and no longer than that
    found = compare.measure({"stock": ask(1.0), "isojax": ask(0.9)}, work, lambda _: None)
    assert found["stock"]["steps"][0]["repeats"] == compare.TURNS[0]


def test_a_ratio_lies_in_an_interval():
    ones = [1.0] * 40
    assert compare.by_turns(ones[:3], [3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert compare.by_turns(ones, [float(i) for i in range(40)]) == (13.0, 19.5, 26.0)  # rank 14, as tables have it
    assert compare.by_turns(ones[:11], [float(i) for i in range(11)]) == (1.0, 5.0, 9.0)
    for n in range(1, compare.TURNS[1] + 1):
        low, ratio, high = compare.by_turns([1.0] * n, [float(i) for i in range(n)])
        assert 0 <= low <= ratio <= high and low + high == n - 1


def test_noise_is_no_verdict():
    stock, ours = side("stock", 2.0, 1000), side("isojax", 2.0, 1000)
    ours["steps"][0]["step_turns_ms"] = [1.8, 4.0, 12.0]
    table = compare.rows(dict(stock=stock, isojax=ours))
    assert (table[0]["ratio"], table[0]["interval"], table[0]["bar"]) == (1.0, "0.900 to 1.200", "<= 1.05: in doubt")
    assert table[0]["quickest"] == 0.933  # 1.8 to 4.0 and 2.0 to 4.0, a tenth of the turns each
    assert bars.unmet(table) == "in doubt: decode step, 1 x 128, ms"


def test_a_turn_without_a_decode_step_costs_that_turn_alone():
    answers = iter([dict(prefill=1.0, decode=[1.0] if i % 3 else []) for i in range(1000)])
    ask = SimpleNamespace(ask=lambda what, *_: next(answers) if what == "step" else 1.0)
    found = compare.measure({"stock": ask}, Workload("tiny", steps=((4, 8),), requests=0), lambda _: None)
    assert found["stock"]["steps"][0]["repeats"] == len(found["stock"]["steps"][0]["step_turns_ms"]) == compare.SURE[0]


def test_a_kind_of_step_that_never_ran_is_no_row():
    engines = {"stock": SimpleNamespace(ask=lambda *_: dict(prefill=1.0, decode=[]))}
    with pytest.raises(IsoError, match="no two steps in a row ran 4 sequences"):
        compare.measure(engines, Workload("tiny", steps=((4, 8),)), lambda _: None)


SIDE = """
import json, os, subprocess, sys, threading, time
answers = os.fdopen(int(sys.argv[-1]), "w")
say = lambda x: print(json.dumps(x), file=answers, flush=True)
print("in the log")
say(dict(side=sys.argv[1]))
for line in sys.stdin:
    what, *args = json.loads(line)
    if what == "end":
        sys.exit("it broke")
    if what == "hang":  # as threads of a library may, when the descriptor is closed already
        answers.close()
        threading.Thread(target=time.sleep, args=(600,)).start()
        sys.exit("it hung")
    if what == "start":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        say(child.pid)
        continue
    say([what, sum(args)])
"""


def test_a_side_answers_questions_until_it_is_left(tmp_path, monkeypatch):
    (tmp_path / "toyside.py").write_text(SIDE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with process.Asked("ours", ["toyside", "isojax"], tmp_path / "log") as side:
        assert side.answer() == dict(side="isojax")
        assert side.ask("add", 1, 2) == ["add", 3]
    assert side._process.returncode == 0 and "in the log" in (tmp_path / "log").read_text()
    with process.Asked("ours", ["toyside", "isojax"], tmp_path / "log") as side:
        side.answer()
        with pytest.raises(IsoError, match="(?s)ours ended with code 1.*it broke"):
            side.ask("end")
        with pytest.raises(IsoError, match="ours ended with code 1"):
            side.ask("add", 1)
    monkeypatch.setattr(process, "PATIENCE", 1)
    with process.Asked("ours", ["toyside", "isojax"], tmp_path / "log") as side:
        side.answer()
        child = side.ask("start")
        with pytest.raises(IsoError, match="ours ended with code -15"):
            side.ask("hang")
    with pytest.raises(ProcessLookupError):  # what it had started has ended with it
        for _ in range(100):
            os.kill(child, 0)
            time.sleep(0.05)
    monkeypatch.setattr(process, "SECONDS", 0.1)
    with pytest.raises(IsoError, match=r"ours was ended after 0.1 s"):
        with process.Asked("ours", ["toyside", "isojax"], tmp_path / "log") as side:
            side.answer()
            side.answer()  # to a question that nobody asked


def test_a_failure_gives_the_cause_that_another_process_logged(tmp_path):
    log = tmp_path / "log"
    cause = ["(EngineCore pid=7) ERROR 01-01 ValueError: Free memory (58.3 GiB) is less than desired"]
    log.write_text("\n".join([*["INFO loading"] * 50, *cause, *["traceback of the parent"] * 20, "see above"]))
    said = str(process.failed("ours", "ended with code 1", log))
    assert "Free memory (58.3 GiB)" in said and said.endswith("see above") and "loading" not in said
    log.write_text("one line")
    assert str(process.failed("ours", "ended with code 1", log)).endswith("ends:\none line")


def test_without_a_terminal_progress_is_a_line_for_each_thing_said(capsys):
    with shown.running("engine") as say:
        say("start of stock")
    assert capsys.readouterr().err == "engine: start of stock\n"


def side(name: str, step: float, tokens: float) -> dict:
    turns = dict(prefill_turns_ms=[4.0, 5.0], step_turns_ms=[step, 2 * step, 5 * step])
    steps = [dict(sequences=1, prompt=128, prefill_ms=4.0, step_ms=step, **turns)]
    batch = dict(requests=8, tokens=800, s=800 / tokens, tokens_per_s=tokens)
    memory = dict(kv_cache=0.0, weights=100.0, activation=10.0, reserved=0.0)
    kernels = dict(iso_start_s={"contract": 1.0, "kernels to profile": 3.0, "kernels": 8.5, "graphs and warm-up": 30.0})
    kernels |= dict(iso_kernels=dict(kept=0, compiled=150))
    return dict(side=name, device="NVIDIA H200", steps=steps, batch=batch, start_s=20.0, memory=memory) | kernels


def test_ratios_are_our_time_over_stocks():
    table = compare.rows(dict(stock=side("stock", 2.0, 1000), isojax=side("isojax", 3.0, 500)))
    by = {row["what"]: row["ratio"] for row in table}
    assert by["decode step, 1 x 128, ms"] == 1.5 and by["8 requests, tokens/s"] == 2.0
    assert by["weights and activations, MiB"] == 1.0
    assert [row["bar"][9:] for row in table] == ["MISSED", "met", "MISSED", "", "met", "met"]
    assert bars.unmet(table) == "missed: decode step, 1 x 128, ms, missed: 8 requests, tokens/s"


@pytest.mark.parametrize(
    ("kept", "compiled", "what", "bar"),
    [
        (0, 150, "start: kernels, cold, s", "<= 90 s: met"),
        (150, 0, "start: kernels, warm, s", "<= 10 s: MISSED"),
        (149, 1, "start: kernels, 149 of 150 kept, s", ""),
    ],
)
def test_a_start_is_judged_by_what_was_kept(kept, compiled, what, bar):
    ours = side("isojax", 2.0, 1000) | dict(iso_kernels=dict(kept=kept, compiled=compiled))
    [row] = [r for r in compare.rows(dict(stock=side("stock", 2.0, 1000), isojax=ours)) if "kernels" in r["what"]]
    assert (row["what"], row["isojax"], row["bar"]) == (what, 11.5, bar)


def test_nothing_is_judged_without_a_gpu():
    here = {name: side(name, 2.0, 1000) | dict(device="cpu", iso_start_s={"contract": 1.0}) for name in compare.SIDES}
    table = compare.rows(here)
    assert not any(row["bar"] or "kernels" in row["what"] for row in table)
    assert "no bar was judged" in bars.unmet(table)


def test_the_command_in_json_says_where_it_ran(tmp_path, monkeypatch):
    found = {name: side(name, 3.0 if name == "isojax" else 2.0, 1000) for name in compare.SIDES}
    monkeypatch.setattr(compare, "run", lambda *_: found)
    app = typer.Typer()
    app.command()(engine)
    args = ["--model", "tiny", "--check", "0", "--folder", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, args)
    machine = json.loads(done.stdout)["machine"]
    assert done.exit_code == 0 and machine["versions"]["torch"] and machine["date"] and "driver" in machine
    strict = CliRunner().invoke(app, [*args, "--strict"])
    assert strict.exit_code == 1 and "missed: decode step" in strict.stderr


def test_a_checkpoint_is_of_the_named_model(tmp_path):
    work = Workload("tiny", layers=1)
    assert load_config(checkpoint(work, tmp_path / "model")) == work.config


def test_a_process_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    with pytest.raises(IsoError, match="(?s)stock ended with code 1.*No module named"):
        process.run("stock", ["bridges.vllm.bench.nowhere"], tmp_path / "log")
    monkeypatch.setattr(process, "SECONDS", 0.1)
    with pytest.raises(IsoError, match="stock was ended after 0.1 s"):
        process.run("stock", ["http.server", "0"], tmp_path / "log")


def test_two_runs_do_not_share_a_folder(tmp_path):
    with compare._alone(tmp_path), pytest.raises(InputError, match="another .*--folder"):
        compare.run(Workload("tiny"), tmp_path, print)


def test_the_command_asks_for_what_a_workload_has_by_default():
    asked = {p.name: p.default for p in inspect.signature(engine).parameters.values()}
    work = Workload()
    for name in ("model", "layers", "decode", "requests", "check", "context", "utilization"):
        assert asked[name] == getattr(work, name), name
    assert asked["steps"] == ",".join(f"{count}x{length}" for count, length in work.steps)


def test_bad_pairs_are_one_sentence():
    app = typer.Typer()
    app.command()(engine)
    result = CliRunner().invoke(app, ["--model", "tiny", "--steps", "1-128"])
    assert isinstance(result.exception, InputError) and "1x128" in str(result.exception)
