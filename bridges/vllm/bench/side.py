"""One engine, in a process of its own: `python -m bridges.vllm.bench.side SIDE WORKLOAD CHECKPOINT OUT`.

SIDE is `stock` (vLLM's own model, runner, compilation and graphs, by its own defaults) or `isojax`. Both sample at
temperature 1 and return the log-probability of each sampled token, as a rollout does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bridges.vllm.bench import steps
from bridges.vllm.bench.workload import CHECKED, CHECKED_NEW, SEQUENCES, Workload

REPEATS = 3, 9  # calls, at least and at most
ENOUGH_S = 4.0  # of one kind of step


def device(worker: Any) -> str:
    """Name of a worker's GPU, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def memory(worker: Any) -> dict[str, float]:
    """MiB, inside a worker: what the KV cache got, and what the rest took of the same share of the GPU."""
    import torch

    if not torch.cuda.is_available():  # vLLM measures none there
        return dict(kv_cache=0.0, weights=0.0, activation=0.0, reserved=0.0)
    parts = dict(  # names of the vLLM that doctor asks for: another one ends the run rather than reading as 0
        kv_cache=worker.available_kv_cache_memory_bytes,
        weights=worker.model_runner.model_memory_usage,
        activation=worker.peak_activation_memory,
        reserved=torch.cuda.max_memory_reserved(),
    )
    return {k: round(v / (1 << 20), 1) for k, v in parts.items()}


def arguments(side: str, work: Workload, model: Path) -> dict[str, Any]:
    """Engine arguments of a side, and its environment set. Both get the same sizes."""
    common: dict[str, Any] = dict(
        max_model_len=work.context,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=work.utilization,
        skip_tokenizer_init=True,
        seed=0,
        **work.engine,
    )
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `memory` is sent to the worker
    # as vLLM sets it itself: asking torch for a GPU must not touch CUDA, or the engine's process cannot be forked
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if side == "isojax":
        from bridges.vllm.engine import engine_args

        return engine_args(model, **common)
    import torch

    from bridges.vllm.environment import prepare

    prepare("sm90" if torch.cuda.is_available() else "cpu")
    args = dict(model=str(model), dtype="bfloat16", **common)
    return args if torch.cuda.is_available() else args | dict(enforce_eager=True, block_size=16)


def start(side: str, work: Workload, model: Path) -> tuple[Any, dict[str, Any]]:
    """An engine, and plain facts about its start: seconds, runner, graphs, memory."""
    args = arguments(side, work, model)
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(disable_log_stats=True, **args)
    out: dict[str, Any] = dict(side=side, start_s=round(time.perf_counter() - begin, 1))
    out["device"] = llm.collective_rpc(device)[0]
    if side == "isojax":
        out["iso_start_s"] = llm.collective_rpc("iso_seconds")[0]
        out["iso_kernels"] = llm.collective_rpc("iso_kernels")[0]
    config = llm.llm_engine.vllm_config
    out["runner"] = "V2" if config.use_v2_model_runner else "V1"
    out["graphs"] = str(config.compilation_config.cudagraph_mode)
    out["memory"] = llm.collective_rpc(memory)[0]
    return llm, out


def measure(llm: Any, work: Workload, sample: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Plain numbers: step rows, tokens/s, and with `sample` rows for the comparison of bits."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    out: dict[str, Any] = {}

    def seconds(prompts: list[list[int]], new: int | list[int]) -> float:
        many = new if isinstance(new, list) else [new] * len(prompts)
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, logprobs=0, ignore_eos=True, detokenize=False) for n in many
        ]
        begin = time.perf_counter()
        outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        took = time.perf_counter() - begin
        got = sum(len(o.outputs[0].token_ids) for o in outs)
        if got != sum(many):
            raise RuntimeError(f"{got} tokens came back, {sum(many)} were asked for")
        return took

    out["steps"] = []
    for count, length in work.steps:
        out["steps"].append(_timed(llm, work, count, length, seconds))
        say(str(out["steps"][-1]))
    if work.requests:
        new = work.batch(0)[1]
        took = min(seconds(*work.batch(salt)) for salt in range(2))
        out["batch"] = dict(requests=len(new), tokens=sum(new), s=round(took, 3), tokens_per_s=round(sum(new) / took))
        say(str(out["batch"]))
    if sample and work.check:
        out["sample"] = _sample(llm, work)
        out["counts"] = llm.collective_rpc("iso_counts")[0]
    return out


def _timed(llm: Any, work: Workload, count: int, length: int, seconds: Callable[..., float]) -> dict[str, Any]:
    """A step row: ms of the prompts with their first token, and of a decode step, medians with quartile spreads."""
    seconds(work.prompts(count, length, 0), 4)  # warm-up
    first, decode, begun = [], [], time.perf_counter()
    for i in range(REPEATS[1]):
        if i >= REPEATS[0] and time.perf_counter() - begun > ENOUGH_S:
            break
        first.append(seconds(work.prompts(count, length, 2 * i + 1), 1))
        llm.collective_rpc(steps.watch)
        seconds(work.prompts(count, length, 2 * i + 2), 1 + work.decode)
        decode += steps.periods(llm.collective_rpc(steps.seen)[0], count)
    if not decode:
        raise RuntimeError(f"no two steps in a row ran {count} sequences; raise --decode")
    row: dict[str, Any] = dict(sequences=count, prompt=length, repeats=len(first))
    for what, taken in (("prefill", first), ("step", decode)):
        low, middle, high = np.percentile(np.array(taken) * 1e3, (25, 50, 75))
        row |= {f"{what}_ms": round(float(middle), 4), f"{what}_spread": round(float((high - low) / middle), 3)}
    return row


def _sample(llm: Any, work: Workload) -> dict[str, Any]:
    """Tokens, log-probabilities and digests of full rows of a few requests, as bridges.vllm.endtoend.compare takes."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from bridges.vllm.tap import by_request

    prompts = [work.prompts(1, n, 99)[0] for n in CHECKED[: work.check]]
    params = SamplingParams(temperature=0.0, max_tokens=CHECKED_NEW, logprobs=0, ignore_eos=True, detokenize=False)
    llm.collective_rpc("iso_tap", args=("digest",))
    outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
    rows = by_request(llm.collective_rpc("iso_take")[0])
    llm.collective_rpc("iso_tap", args=(None,))
    done = [o.outputs[0] for o in outs]
    return dict(
        prompts=prompts,
        tokens=[list(o.token_ids) for o in done],
        logprobs=[[e[t].logprob for t, e in zip(o.token_ids, o.logprobs, strict=True)] for o in done],
        rows=[rows[o.request_id] for o in outs],
    )


def main(side: str, workload: str, model: str, out: str) -> int:
    say = lambda text: print(f"{side}: {text}", file=sys.stderr, flush=True)
    work = Workload.load(Path(workload))
    llm, found = start(side, work, Path(model))
    say(str(found))
    found |= measure(llm, work, side == "isojax", say)
    Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # vLLM's threads may hang an orderly exit; everything is on disk
