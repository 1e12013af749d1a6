"""Engines in processes of their own: vLLM's engine core and worker, an engine without our worker, and SmolLM2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isojax.errors import Unavailable
from tests.integration.vllm.driver import Answer, Oracle, check, prompts
from tests.integration.vllm.processes import NEW

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROOT = Path(__file__).parents[3]


def start(module: str, *args: str, limit: int = 840) -> str:
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env={**os.environ})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_engine_in_its_own_processes(tiny, tmp_path):
    asked = dict(enumerate(prompts()))
    (tmp_path / "prompts.json").write_text(json.dumps(list(asked.values())))
    start("tests.integration.vllm.processes", str(tiny), str(tmp_path / "prompts.json"), str(tmp_path / "out.json"))
    got = {
        i: Answer(a["tokens"], a["logprobs"], {int(p): row for p, row in a["rows"].items()})
        for i, a in enumerate(json.loads((tmp_path / "out.json").read_text()))
    }
    assert check(got, Oracle(tiny).answers(asked, NEW), asked) >= len(asked) * NEW


def test_an_engine_without_our_worker_does_not_start(tiny):
    from vllm import LLM

    from bridges.vllm import engine_args

    args = engine_args(tiny, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4) | {"worker_cls": "auto"}
    with pytest.raises(Unavailable, match="bridges.vllm.worker.IsoWorker"):
        LLM(**args)


def test_smollm2():
    from isojax import demo

    sizes = json.dumps({"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8})
    out = start(
        "bridges.vllm.endtoend", str(demo.checkpoint()), "--new", "6", "--lengths", "5", "33", "--options", sizes
    )
    report = json.loads(out.splitlines()[-1])
    assert report["rows_differing"] == report["logprobs_differing"] == 0
    assert report["rows"] >= 4 * 6 and report["cached"] >= 48
