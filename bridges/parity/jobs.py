"""One runtime's part of the main job, each in a process of its own: `python -m bridges.parity.jobs NAME SPEC OUT`."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bridges.parity.record import GRADIENT_CASE, Record, Sequence, bits
from isojax.errors import IsoError

Spec = dict[str, Any]
MODES = {"greedy": 0.0, "sampled": 1.0}
IDLE = {"tp": 1, "sp": 0, "ep": 1, "cp": 1, "pp": 1, "dp": 1}


def engine(spec: Spec, flavour: str) -> Record:
    """Generate with a vLLM engine, stock or ours, recording the log-probability of every sampled token."""
    from bridges.vllm import engine_args
    from bridges.vllm.environment import prepare

    ours = flavour == "isojax"
    common = dict(max_model_len=spec["context"], seed=0, **spec.get("engine", {}))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if ours:
        args = engine_args(spec["model"], contract=spec["contract"], arch=spec["arch"], **common)
    else:
        prepare("cpu" if spec["arch"] == "cpu" else "sm90")
        args = dict(model=spec["model"], dtype="bfloat16", logprobs_mode="raw_logprobs", **common)
        if spec["arch"] == "cpu":
            # vLLM's own sizes for a CPU make its profiling run take minutes
            args |= dict(enforce_eager=True, max_num_batched_tokens=512, max_num_seqs=16, block_size=16)
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(disable_log_stats=True, **args)
    if ours:
        llm.collective_rpc("iso_tap", args=("digest",))
    prompts = [TokensPrompt(prompt_token_ids=p) for p in spec["prompts"]]
    sequences: dict[str, list[Sequence]] = {}
    seconds: dict[str, float] = {}
    for mode, temperature in MODES.items():
        params = SamplingParams(
            temperature=temperature, max_tokens=spec["tokens"], logprobs=0, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds[mode] = round(time.perf_counter() - started, 3)
        rows: dict[str, dict[int, str]] = {}
        if ours:
            from bridges.vllm.tap import by_request

            rows = by_request(llm.collective_rpc("iso_take")[0])
        sequences[mode] = [_from_engine(o, rows.get(o.request_id, {})) for o in outputs]
    identities = llm.collective_rpc("iso_identities")[0] if ours else {}
    return Record("vllm", flavour, "engine", sequences, identities or {}, notes={"generate_seconds": seconds})


def _from_engine(output: Any, rows: dict[int, str]) -> Sequence:
    prompt, done = list(output.prompt_token_ids), output.outputs[0]
    tokens = list(done.token_ids)
    values = [entry[t].logprob for entry, t in zip(done.logprobs, tokens, strict=True)]
    digests = [rows[len(prompt) - 1 + i] for i in range(len(tokens))] if rows else []
    return Sequence(prompt, tokens, bits(values), digests)


def trainer(spec: Spec, flavour: str) -> Record:
    """Recompute an engine's tokens in a Megatron model's gradient-carrying forward, stock or ours."""
    import torch

    from bridges.megatron import start

    start.single()
    from isojax.model import weights

    engine_record = Record.load(Path(spec["tokens_from"]))
    config, params = weights.load(spec["model"])
    if flavour == "stock":
        from bridges.megatron.stock import stock_model

        model: Any = stock_model(config, params)
        identities: dict[str, str] = {}
    else:
        import contract
        from bridges.megatron import adapter
        from bridges.megatron.model import build

        model = build(config, params)
        installed = adapter.install(model, contract.load(spec["contract"]), identities=engine_record.identities)
        identities = installed.identities.plain()
    device = next(model.parameters()).device
    sequences: dict[str, list[Sequence]] = {}
    for mode, given in engine_record.sequences.items():
        lens = [len(s.prompt) + len(s.tokens) for s in given]
        ids = torch.zeros(len(given), max(lens), dtype=torch.int64)
        for i, s in enumerate(given):
            ids[i, : lens[i]] = torch.tensor([*s.prompt, *s.tokens])
        ids = ids.to(device)
        labels = torch.roll(ids, -1, 1)
        digests: list[list[str]] = [[] for _ in given]
        if flavour == "stock":
            out = model.logprobs(ids, labels)
        else:
            padding = torch.arange(ids.shape[1], device=device)[None] >= torch.tensor(lens, device=device)[:, None]
            out = model.logprobs(ids, labels, case=GRADIENT_CASE, padding_mask=padding)
            digests = _vocabulary(model, ids, padding, given, out)
        if not out.requires_grad:
            raise IsoError("the trainer's forward carries no gradient, so it is not the one to compare")
        values = out.detach().cpu().numpy()
        cut = [slice(len(s.prompt) - 1, len(s.prompt) + len(s.tokens) - 1) for s in given]
        sequences[mode] = [
            Sequence(s.prompt, s.tokens, bits(values[i, cut[i]]), digests[i]) for i, s in enumerate(given)
        ]
    return Record("megatron", flavour, GRADIENT_CASE, sequences, identities)


def _vocabulary(model: Any, ids: Any, padding: Any, given: list[Sequence], out: Any) -> list[list[str]]:
    """Digests of full rows, after checking that the gradient-carrying forward picked its values from these rows."""
    from bridges.vllm.tap import digest

    digests = []
    for i, rows in enumerate(model.vocabulary_logprobs(ids, padding_mask=padding)):
        s = given[i]
        first = len(s.prompt) - 1
        mine = rows[first : first + len(s.tokens)].cpu().numpy()
        picked = mine[np.arange(len(s.tokens)), s.tokens]
        forward = out[i, first : first + len(s.tokens)].detach().cpu().numpy()
        if bits(picked) != bits(forward):
            raise IsoError("the trainer's full-vocabulary rows are not those of its gradient-carrying forward")
        digests.append([digest(r) for r in mine])
    return digests


def reference(spec: Spec, flavour: str = "isojax") -> Record:
    """Recompute an engine's tokens in the standalone JAX reference."""
    import contract
    from bridges.vllm.tap import digest
    from isojax import profile
    from isojax.runtime import Reference

    engine_record = Record.load(Path(spec["tokens_from"]))
    ref = Reference.load(spec["model"])
    adapter = contract.Adapter("jax", contract.load(spec["contract"]), registry_view=profile.registry_view(ref.arch))
    adapter.install(("jax_reference",), profile.CASES["jax_reference"][1], IDLE)
    adapter.handshake(engine_record.identities, other_runtime="vllm")
    sequences: dict[str, list[Sequence]] = {}
    for mode, given in engine_record.sequences.items():
        whole = [[*s.prompt, *s.tokens] for s in given]
        rows, picked = ref.score(whole), ref.logprobs(whole)
        out = []
        for s, r, p in zip(given, rows, picked, strict=True):
            cut = slice(len(s.prompt) - 1, len(s.prompt) + len(s.tokens) - 1)
            out.append(Sequence(s.prompt, s.tokens, bits(p[cut]), [digest(x) for x in r[cut]]))
        sequences[mode] = out
    return Record("jax", flavour, "jax_reference", sequences, adapter.identities.plain())


JOBS: dict[str, Callable[..., Record]] = {"vllm": engine, "megatron": trainer, "jax": reference}


def main(name: str, spec_path: str, out: str) -> int:
    """Run one job. Exit code 2 with one line on stderr for a refusal."""
    import contract

    runtime, flavour = name.split("-")
    started = time.perf_counter()
    try:
        record = JOBS[runtime](json.loads(Path(spec_path).read_text()), flavour)
    except (IsoError, contract.ContractError) as e:
        print(f"{name}: {e}", file=sys.stderr)
        return 2
    record.seconds = time.perf_counter() - started
    usage = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    record.peak_mib = max(usage) / 1024
    record.save(Path(out))
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # vLLM's and gloo's threads may hang an orderly exit; everything is on disk
