"""One engine, in a process of its own: `python -m bridges.vllm.bench.side SIDE WORKLOAD CHECKPOINT FD`.

SIDE is `stock` (vLLM's own model, runner, compilation and graphs, by its own defaults) or `isojax`. Both sample at
temperature 1 and return the log-probability of each sampled token, as a rollout does. It answers on the descriptor FD,
a JSON line each: first what its start was like, then each question that comes on standard input (`Engine`).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bridges.vllm.bench import steps
from bridges.vllm.bench.workload import CHECKED, CHECKED_NEW, SEQUENCES, Workload

FRESH = 1 << 20  # salt of the prompts that are compared: no turn comes to it


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


class Engine:
    """What a side can be asked: the name of a method, and its arguments. Answers are plain values."""

    def __init__(self, llm: Any, work: Workload):
        self.llm, self.work = llm, work

    def warm_up(self, count: int, length: int) -> float:
        """Seconds of a few steps that nobody counts."""
        return self._seconds(self.work.prompts(count, length, 0), 4)

    def step(self, count: int, length: int, turn: int) -> dict[str, Any]:
        """prefill: seconds of the prompts with their first token. decode: of a decode step, several."""
        first = self._seconds(self.work.prompts(count, length, 2 * turn + 1), 1)
        self.llm.collective_rpc(steps.watch)
        self._seconds(self.work.prompts(count, length, 2 * turn + 2), 1 + self.work.decode)
        return dict(prefill=first, decode=steps.periods(self.llm.collective_rpc(steps.seen)[0], count))

    def batch(self, salt: int) -> float:
        """Seconds of the continuous batch."""
        return self._seconds(*self.work.batch(salt))

    def sample(self) -> dict[str, Any]:
        """Rows for the comparison of bits, and how many steps ran without a graph."""
        return dict(sample=_sample(self.llm, self.work), counts=self.llm.collective_rpc("iso_counts")[0])

    def _seconds(self, prompts: list[list[int]], new: int | list[int]) -> float:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        many = new if isinstance(new, list) else [new] * len(prompts)
        params = [
            SamplingParams(temperature=1.0, max_tokens=n, logprobs=0, ignore_eos=True, detokenize=False) for n in many
        ]
        begin = time.perf_counter()
        outs = self.llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        took = time.perf_counter() - begin
        got = sum(len(o.outputs[0].token_ids) for o in outs)
        if got != sum(many):
            raise RuntimeError(f"{got} tokens came back, {sum(many)} were asked for")
        return took


def _sample(llm: Any, work: Workload) -> dict[str, Any]:
    """Tokens, log-probabilities and digests of full rows of a few requests, as bridges.vllm.endtoend.compare takes."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    from bridges.vllm.tap import by_request

    prompts = [work.prompts(1, n, FRESH)[0] for n in CHECKED[: work.check]]
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


def main(side: str, workload: str, model: str, descriptor: str) -> int:
    work = Workload.load(Path(workload))
    with os.fdopen(int(descriptor), "w") as answers:
        os.set_inheritable(answers.fileno(), False)
        answer = lambda x: print(json.dumps(x), file=answers, flush=True)
        llm, found = start(side, work, Path(model))
        answer(found)
        engine = Engine(llm, work)
        for line in sys.stdin:
            what, *args = json.loads(line)
            answer(getattr(engine, what)(*args))
    return 0


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's threads may hang an orderly exit; everything has been answered
