"""The engine's bits against plain JAX, in one call: `python -m bridges.vllm.endtoend CHECKPOINT [--eager]`.

Requests arrive late, are chunked and hit the prefix cache; each full-vocabulary row that the sampler saw is compared by
digest with the same position of the whole sequence scored by isojax.runtime.Reference. On CUDA with graphs on, the
report also shows that the steps were replayed: `forwards` counts the ones that Python ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridges.vllm.engine import engine_args
from bridges.vllm.tap import by_request, digest
from isojax.errors import InputError
from isojax.model.config import load_config

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200, 7, 300, 33, 128)


def prompts(vocab: int, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random token ids; the last two prompts share a prefix of 48 tokens, so that one finds the other's blocks."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, vocab, n).tolist() for n in lengths]
    stem = rng.integers(0, vocab, 48).tolist()
    return [*made, [*stem, *made[0]], [*stem, *made[1]]]


def generate(
    model: str | Path, asked: Sequence[Sequence[int]], new: int = 32, *, eager: bool = False, **options: Any
) -> dict[str, Any]:
    """Greedy tokens, their log-probabilities, and row digests by position, from an in-process engine.

    options: overrides of engine_args. Returns tokens, logprobs, rows (one item a request), and what the engine did:
    forwards and graphs (see IsoWorker.iso_counts), steps, cached prompt tokens, seconds.
    """
    if eager:
        options["enforce_eager"] = True
    if torch.cuda.is_available():
        options.setdefault("gpu_memory_utilization", 0.5)  # the reference comes to the same GPU
    args = engine_args(model, **options)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(**args)
    llm.collective_rpc("iso_tap", args=("digest",))
    before = llm.collective_rpc("iso_counts")[0]
    engine, params = llm.llm_engine, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0)
    waiting, steps, done, started = list(enumerate(asked)), 0, {}, time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 2 == 0:
            key, prompt = waiting.pop(0)
            engine.add_request(str(key), {"prompt_token_ids": list(prompt)}, params)  # type: ignore[arg-type]
        for out in engine.step():
            if out.finished:
                done[int(out.request_id)] = out
        steps += 1
    seconds = time.perf_counter() - started
    counts = llm.collective_rpc("iso_counts")[0]
    rows = by_request(llm.collective_rpc("iso_take")[0])
    outs = [done[i].outputs[0] for i in range(len(asked))]
    logprobs = [[e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)] for o in outs]
    return {
        "tokens": [list(o.token_ids) for o in outs],
        "logprobs": logprobs,
        "rows": [rows[str(i)] for i in range(len(asked))],
        "forwards": counts["forwards"] - before["forwards"],
        "graphs": counts["graphs"],
        "steps": steps,
        "cached": sum(done[i].num_cached_tokens or 0 for i in done),
        "seconds": seconds,
    }


def compare(
    model: str | Path, asked: Sequence[Sequence[int]], got: dict[str, Any], *, packed: bool = False
) -> dict[str, int]:
    """Counts: rows and log-probabilities compared with the reference, and how many of each differ in a bit.

    packed: the reference scores all sequences in one batch, which compiles one set of kernels; else each alone.
    """
    from isojax.runtime import Reference

    reference = Reference.load(model)
    count: dict[str, int] = {"rows": 0, "rows_differing": 0, "logprobs": 0, "logprobs_differing": 0}
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(asked, got["tokens"], strict=True)]
    batches = [sequences] if packed else [[s] for s in sequences]
    every = (scored for batch in batches for scored in reference.score(batch))
    for scored, prompt, tokens, logprobs, rows in zip(
        every, asked, got["tokens"], got["logprobs"], got["rows"], strict=True
    ):
        count["rows"] += len(rows)
        count["rows_differing"] += sum(digest(scored[p]) != row for p, row in rows.items())
        at = np.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        want, have = scored[at, tokens], np.array(logprobs, np.float32)
        count["logprobs"] += len(want)
        count["logprobs_differing"] += int((want.view(np.int32) != have.view(np.int32)).sum())
    return count


def run(
    model: str | Path, new: int = 32, *, eager: bool = False, lengths: Sequence[int] = LENGTHS, **options: Any
) -> dict[str, Any]:
    """generate and compare on random prompts; plain numbers. Raises InputError where the proof would be empty."""
    asked = prompts(load_config(model).vocab, lengths)
    got = generate(model, asked, new, eager=eager, **options)
    report = {k: v for k, v in got.items() if k not in ("tokens", "logprobs", "rows")} | compare(model, asked, got)
    if not report["cached"]:
        raise InputError("no prompt token came from the prefix cache; leave prefix caching on")
    if report["graphs"] and report["forwards"]:
        raise InputError(f"{report['forwards']} of {report['steps']} steps ran outside the captured CUDA graphs")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 only if no row and no log-probability differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--new", type=int, default=32, help="tokens per request")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the prompts")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further engine arguments")
    args = parser.parse_args(argv)
    report = run(args.model, args.new, eager=args.eager, lengths=args.lengths, **args.options)
    print(json.dumps(report))
    return int(report["rows_differing"] + report["logprobs_differing"] > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's and gloo's threads may hang an orderly exit
