"""An engine in its own processes: `python -m tests.integration.vllm.processes CHECKPOINT PROMPTS.json OUT.json`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bridges.vllm import engine_args
from bridges.vllm.tap import by_request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

NEW = 12


def logprobs(completion: CompletionOutput) -> list[float]:
    """Of the tokens that were sampled."""
    picked = []
    for token, entries in zip(completion.token_ids, completion.logprobs or [], strict=True):
        assert entries is not None
        picked.append(entries[token].logprob)
    return picked


def main(checkpoint: str, given: str, out: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    args = engine_args(checkpoint, max_model_len=256, num_gpu_blocks_override=64, max_num_batched_tokens=128)
    from vllm import LLM, SamplingParams

    llm = LLM(**args)
    assert not hasattr(llm.llm_engine, "model_executor"), "the engine runs in this process"
    llm.collective_rpc("iso_tap", args=("digest",))
    prompts = json.loads(Path(given).read_text())
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    rows = by_request(llm.collective_rpc("iso_take")[0])
    answers = [
        {
            "tokens": list(o.outputs[0].token_ids),
            "logprobs": logprobs(o.outputs[0]),
            "rows": rows[o.request_id],
        }
        for o in outs
    ]
    Path(out).write_text(json.dumps(answers))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may hang an orderly exit
