"""A real vLLM engine against plain JAX on the same checkpoint: equal tokens, and equal bits in the whole vocabulary.

One engine serves every test. It has 39 blocks of 16 tokens for requests of up to 256, so preemption can be forced.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.integration import models
from tests.integration.vllm.driver import NEW, Engine, Oracle, check, prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK = 16


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    import contract as contracts
    from isojax import profile

    path = tmp_path_factory.mktemp("contract") / "dense.cpu.json"
    contracts.save(profile.build("dense", "cpu"), path)
    return path


@pytest.fixture(scope="module")
def engine(tiny, contract) -> Iterator[Engine]:
    from vllm import LLM

    from bridges.vllm import engine_args

    args = engine_args(
        tiny, contract, max_model_len=256, num_gpu_blocks_override=40, max_num_seqs=8, disable_log_stats=False
    )
    llm = LLM(**args)
    yield Engine(llm)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def oracle(tiny) -> Oracle:
    return Oracle(tiny)


@pytest.fixture(scope="module")
def asked():
    return dict(enumerate(prompts()))


@pytest.fixture(scope="module")
def want(oracle, asked):
    return oracle.answers(asked)


@pytest.fixture(autouse=True)
def cold(engine):
    assert engine.llm.reset_prefix_cache()


def test_together(engine, asked, want):
    assert check(engine.run(asked), want, asked) >= len(asked) * NEW


def test_alone(engine, asked, want):
    for key, prompt in asked.items():
        check(engine.run({key: prompt}), want, {key: prompt})


def test_shuffled(engine, asked, want):
    order = np.random.default_rng(1).permutation(len(asked)).tolist()
    shuffled = {k: asked[k] for k in order}
    check(engine.run(shuffled), want, shuffled)


def test_late_arrivals(engine, asked, want):
    check(engine.run(asked, arrive={k: 2 * k for k in asked}), want, asked)


@pytest.mark.parametrize("budget", [16, 48, 512])
def test_chunk_budgets(engine, asked, want, budget, monkeypatch):
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", budget)
    check(engine.run(asked), want, asked)


def test_prefix_cache_cold_and_hit(engine, oracle):
    lengths = [n + d for n in (BLOCK, 2 * BLOCK, 3 * BLOCK) for d in (-1, 0, 1)]
    every = dict(enumerate(prompts(lengths, seed=7)))
    want = oracle.answers(every, 4)
    for i, prompt in every.items():
        asked = {i: prompt}
        cold = engine.run(asked, 4)
        hit = engine.run(asked, 4)
        check(cold, want, asked)
        check(hit, want, asked)
        assert cold[i].cached == 0
        assert hit[i].cached == (len(prompt) - 1) // BLOCK * BLOCK  # the last token is always computed


def test_shared_prefix_between_requests(engine, oracle):
    stem = prompts([2 * BLOCK], seed=8)[0]
    asked = {i: [*stem, *tail] for i, tail in enumerate(prompts([1, 7, 30], seed=9))}
    got = engine.run(asked, 4, arrive={0: 0, 1: 3, 2: 3})
    check(got, oracle.answers(asked, 4), asked)
    assert got[1].cached == got[2].cached == 2 * BLOCK


def test_preemption(engine, oracle):
    asked = dict(enumerate(prompts([90] * 6, seed=3)))
    new = 40  # 9 blocks a request; 39 blocks hold four of them
    before = engine.count("vllm:num_preemptions")
    got = engine.run(asked, new)
    assert engine.count("vllm:num_preemptions") > before
    check(got, oracle.answers(asked, new), asked)


def test_prompt_logprobs(engine, oracle):
    asked = dict(enumerate(prompts([21, 40], seed=4)))
    got = engine.run(asked, 2, prompt_logprobs=0)
    for key, prompt in asked.items():
        rows = oracle.reference.score([prompt])[0]
        given = [entry[t].logprob for t, entry in zip(prompt[1:], got[key].prompt_logprobs[1:], strict=True)]
        assert given == [float(rows[i][t]) for i, t in enumerate(prompt[1:])]


def test_the_trainers_head_gives_the_sampled_bits(engine, oracle, asked, want):
    got = engine.run(asked)
    for key, prompt in asked.items():
        trainer = oracle.reference.logprobs([[*prompt, *got[key].tokens]])[0][len(prompt) - 1 :]
        assert np.array_equal(np.float32(got[key].logprobs).view(np.int32), trainer.view(np.int32))


def test_sampled_at_temperature_one(engine, oracle):
    from vllm import SamplingParams

    asked = prompts([9, 30], seed=5)
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, logprobs=0)
    outs = engine.llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    engine.llm.collective_rpc("iso_take")
    for prompt, out in zip(asked, outs, strict=True):
        tokens = list(out.outputs[0].token_ids)
        rows = oracle.reference.score([[*prompt, *tokens]])[0][len(prompt) - 1 :]
        given = [entry[t].logprob for t, entry in zip(tokens, out.outputs[0].logprobs, strict=True)]
        assert given == [float(row[t]) for row, t in zip(rows[:-1], tokens, strict=True)]


def test_the_gate_catches_one_changed_weight(engine, asked, want):
    """Negative control: the comparison above fails on a single flipped bit of one parameter."""
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.iso_model
    weight = model.get_parameter("weights.layers.1.down")
    bits = weight.data.view(-1).view(torch.int16)
    bits[0] ^= 64
    try:
        with pytest.raises(AssertionError):
            check(engine.run(asked), want, asked)
    finally:
        bits[0] ^= 64


def test_weights_reloaded_in_place_are_used_by_the_next_step(engine, tiny, folder):
    other = models.checkpoint(folder, "llama", seed=1)
    asked = dict(enumerate(prompts([20, 5], seed=6)))
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    try:
        assert engine.llm.reset_prefix_cache()
        check(engine.run(asked, 4), Oracle(other).answers(asked, 4), asked)
    finally:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny)})


def test_an_engine_wakes_from_deep_sleep(engine, tiny, asked, want):
    """vLLM's sleep at level 2 discards what the model made on the GPU; waking brings buffers, a reload parameters."""
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.iso_model
    saved = {name: b.clone() for name, b in model.named_buffers()}
    lost = [*model.parameters(), model.programs.rope, model.step.no_slot, *model.step.arrays(256)[:-1]]
    for x in lost:
        x.data.reshape(-1).view(torch.uint8).fill_(0x7F)
    for name, b in model.named_buffers():
        b.data.copy_(saved[name])
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny)})
    check(engine.run(asked), want, asked)


def test_vllms_own_tensors_never_move(engine, asked, want, monkeypatch):
    """A CUDA graph reads them where they were when it was captured (`Step.take`). Here of the V1 runner."""
    step = engine.llm.llm_engine.model_executor.driver_worker.worker.iso_model.step
    seen, sizes, take = set(), set(), step.take

    def watched(arrays, common):
        seen.add(tuple(x.data_ptr() for x in (common.positions, common.slot_mapping, common.block_table_tensor)))
        sizes.add((common.num_actual_tokens, common.num_reqs))
        take(arrays, common)

    monkeypatch.setattr(step, "take", watched)
    check(engine.run(asked, arrive={key: 2 * key for key in asked}), want, asked)
    assert len(seen) == 1 and len(sizes) > 2


def test_the_contract_is_installed(engine, contract):
    import contract as contracts

    identities = contracts.load(contract).identities
    assert identities is not None
    assert engine.llm.collective_rpc("iso_identities") == [identities.plain()]
