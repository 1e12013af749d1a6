"""A real Megatron model's log-probabilities against the JAX reference's, bit for bit, however the batch is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bridges.megatron import model, score
from bridges.megatron.score import packed, padded
from isojax.model import weights
from isojax.runtime import Reference
from tests.integration import models
from tests.integration.megatron.conftest import bits, differing, unpacked, unpadded

FULL: dict[str, Any] = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_gradient_carrying_logprobs_are_the_references(cases, family):
    c = cases(family)
    trainer = model.load(c.path)
    tokens, labels, mask = padded(c.sequences)
    for temperature, expected in c.logprobs.items():
        found = trainer.logprobs(tokens, labels, case="trainer_fwd", temperature=temperature, attention_mask=mask)
        assert found.requires_grad
        assert differing(unpadded(found, c.sequences), expected) == 0
    assert differing(trainer.vocabulary_logprobs(tokens, attention_mask=mask), c.rows) == 0
    assert trainer.runtime.compiled_regions() == trainer.runtime.regions()


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_micro_batches(cases, size, recompute):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params, **recompute)
    found = {"trainer_fwd": [], "trainer_score": []}
    for i in range(0, 8, size):
        part = c.sequences[i : i + size]
        tokens, labels, mask = padded(part)
        for case, into in found.items():
            into += unpadded(trainer.logprobs(tokens, labels, case=case, attention_mask=mask), part)
    for case, values in found.items():
        assert differing(values, c.logprobs[1.0]) == 0, case


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["kept", "recomputed"])
@pytest.mark.parametrize("slot", [1, 8])
def test_packed(cases, slot, recompute):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params, **recompute)
    tokens, labels, packing = packed(c.sequences, slot)
    for case in ("trainer_fwd", "trainer_score"):
        found = trainer.logprobs(tokens, labels, case=case, packed_seq_params=packing)
        assert differing(unpacked(found, c.sequences, slot), c.logprobs[1.0]) == 0, case


def test_every_kind_of_mask_gives_the_same_rows(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    tokens, labels, mask = padded(c.sequences)
    s = tokens.shape[1]
    hidden = ~torch.ones(s, s, dtype=torch.bool).tril() | (mask == 0)[:, None, None, :]
    for masks in (dict(attention_mask=hidden), dict(padding_mask=mask == 0)):
        found = trainer.logprobs(tokens, labels, case="trainer_fwd", **masks)
        assert differing(unpadded(found, c.sequences), c.logprobs[1.0]) == 0
    causal = hidden[3:4] & False | ~torch.ones(s, s, dtype=torch.bool).tril()
    found = trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=causal)  # padding computed, unused
    assert differing(unpadded(found, c.sequences), c.logprobs[1.0]) == 0


def test_temperature_per_sequence(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    tokens, labels, mask = padded(c.sequences)
    temperature = torch.tensor([1.0, 0.7] * 4)[:, None]
    found = unpadded(
        trainer.logprobs(tokens, labels, case="trainer_fwd", temperature=temperature, attention_mask=mask), c.sequences
    )
    assert differing(found[::2], c.logprobs[1.0][::2]) == 0
    assert differing(found[1::2], c.logprobs[0.7][1::2]) == 0


def test_a_plain_call_returns_the_loss(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    tokens, labels, mask = padded(c.sequences)
    loss = trainer(tokens, None, mask, labels=labels)
    assert differing([-x for x in unpadded(loss, c.sequences)], c.logprobs[1.0]) == 0


def test_control_another_rounding_is_seen(cases):
    """Negative control: the comparison fails where one row of one weight matrix differs in its lowest bit."""
    c = cases("qwen3")
    params = {k: v.clone() for k, v in c.params.items()}
    params["layers.1.o"].view(torch.int16)[3] ^= 1
    tokens, labels, mask = padded(c.sequences)
    found = model.build(c.config, params).logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask)
    assert differing(unpadded(found, c.sequences), c.logprobs[1.0]) > 0


def test_hidden_states_and_operands(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    reference = Reference(c.config, weights.as_jax(c.params))
    tokens, _, mask = padded(c.sequences)
    hidden = trainer.hidden(tokens, attention_mask=mask)
    expected = np.asarray(reference.hidden(c.sequences)).view(np.int16)[: sum(map(len, c.sequences))]
    rows = torch.cat([hidden[: len(s), i] for i, s in enumerate(c.sequences)])
    assert (bits(rows) == expected).all()
    forwards = trainer.runtime.layer.forwards()
    assert forwards and all(f.strided_operands == 0 for f in forwards)


@pytest.mark.parametrize("pack", [False, True])
def test_score_takes_batches_apart(cases, pack):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    found = score.score(trainer, c.sequences, case="trainer_score", temperature=0.7, pack=pack, hidden=True)
    assert differing(found.logprobs, c.logprobs[0.7]) == 0
    expected = Reference(c.config, weights.as_jax(c.params)).hidden(c.sequences)
    rows = np.concatenate(found.hidden)
    assert (rows == np.asarray(expected).view(np.int16)[: len(rows)]).all()


@pytest.mark.slow
def test_smollm2():
    from transformers import AutoTokenizer

    from isojax import demo

    path = demo.checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(path)
    sequences = [tokenizer(p)["input_ids"] for p in demo.PROMPTS[:4]]
    expected = Reference.load(path).logprobs(sequences)
    trainer = model.load(path)
    tokens, labels, mask = padded(sequences)
    found = trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask)
    assert differing(unpadded(found, sequences), expected) == 0
