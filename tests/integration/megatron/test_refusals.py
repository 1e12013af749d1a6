"""What this bridge does not run is refused by name, before anything is computed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from bridges.megatron import model, start
from bridges.megatron.config import transformer_config
from bridges.megatron.logprob import LogProbs
from bridges.megatron.score import packed, padded
from isojax.errors import CheckpointError, InputError, Unavailable, Unsupported


@pytest.mark.parametrize(
    "field, value",
    [
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 2),
        ("sequence_parallel", True),
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("fp8", "hybrid"),
        ("num_moe_experts", 4),
        ("multi_latent_attention", True),
        ("normalization", "LayerNorm"),
        ("window_size", (128, 0)),
        ("recompute_granularity", "selective"),
        ("add_bias_linear", True),
        ("activation_func", torch.nn.functional.gelu),
        ("softmax_scale", 1.0),
        ("hidden_size", 512),
        ("num_layers", 3),
        ("params_dtype", torch.float16),
    ],
)
def test_transformer_config_fields(cases, field, value):
    with pytest.raises(Unsupported, match=rf"TransformerConfig\.{field}: given .*; allowed .*; set {field}"):
        transformer_config(cases("qwen3").config, **{field: value})


@pytest.fixture(scope="module")
def trainer(cases):
    c = cases("qwen3")
    return model.build(c.config, c.params)


def run(trainer, sequences, case="trainer_fwd", temperature=1.0, **changes):
    tokens, labels, mask = padded(sequences)
    given = dict(tokens=tokens, labels=labels, attention_mask=mask) | changes
    return trainer.logprobs(**given, case=case, temperature=temperature)


def test_left_padding(cases, trainer):
    tokens, labels, mask = (x.flip(1) for x in padded(cases("qwen3").sequences[:2]))
    for masks in (dict(attention_mask=mask), dict(padding_mask=mask == 0)):
        with pytest.raises(InputError, match="sequence 0 is left-padded: its first token is at column 4"):
            trainer.logprobs(tokens, labels, case="trainer_fwd", **masks)


def test_masks_that_are_not_causal_sequences(cases, trainer):
    part = cases("qwen3").sequences[:2]
    tokens, labels, mask = padded(part)
    holes = mask.clone()
    holes[0, 3] = 0
    with pytest.raises(InputError, match="has padding between its tokens"):
        run(trainer, part, attention_mask=holes)
    s = tokens.shape[1]
    with pytest.raises(InputError, match="not causal"):
        run(trainer, part, attention_mask=torch.zeros(1, 1, s, s, dtype=torch.bool))
    with pytest.raises(InputError, match="attention_mask has shape"):
        run(trainer, part, attention_mask=mask[:, :-1])
    with pytest.raises(InputError, match="attention_mask says lengths"):
        run(trainer, part, padding_mask=torch.zeros_like(mask, dtype=torch.bool))


def test_packed_sequences_that_do_not_fit(cases, trainer):
    tokens, labels, packing = packed(cases("qwen3").sequences)
    packing.cu_seqlens_q = packing.cu_seqlens_kv = packing.cu_seqlens_q + 1
    with pytest.raises(InputError, match="do not cut 64 rows"):
        trainer.logprobs(tokens, labels, case="trainer_fwd", packed_seq_params=packing)
    packing.qkv_format = "sbhd"
    with pytest.raises(InputError, match="give qkv_format 'thd'"):
        trainer.logprobs(tokens, labels, case="trainer_fwd", packed_seq_params=packing)


def test_tokens_labels_and_lengths(cases, trainer):
    part = cases("qwen3").sequences[:2]
    tokens, labels, _ = padded(part)
    with pytest.raises(InputError, match="token 512 is no token id; allowed are 0 to 511"):
        run(trainer, part, tokens=torch.full_like(tokens, 512))
    with pytest.raises(InputError, match="label -100 is no token id"):
        run(trainer, part, labels=torch.full_like(labels, -100))
    with pytest.raises(InputError, match=r"labels have shape \(2, 12\)"):
        run(trainer, part, labels=labels[:, :-1])
    long = torch.zeros(1, 513, dtype=torch.long)
    with pytest.raises(InputError, match="has 513 tokens; the model has 512 positions"):
        trainer.logprobs(long, long, case="trainer_fwd")


def test_the_case_is_named_and_meant(cases, trainer):
    part = cases("qwen3").sequences[:2]
    with pytest.raises(InputError, match="case 'engine_decode' is not a trainer's"):
        run(trainer, part, case="engine_decode")
    with torch.no_grad(), pytest.raises(InputError, match="trainer_fwd was named, but gradients are off"):
        run(trainer, part)
    with pytest.raises(InputError, match="temperature 0.0 is not positive"):
        run(trainer, part, temperature=0.0)
    assert not run(trainer, part, case="trainer_score").requires_grad


def test_logits_are_never_formed(cases, trainer):
    tokens, _, mask = padded(cases("qwen3").sequences[:2])
    with pytest.raises(Unsupported, match="no labels"):
        trainer(tokens, None, mask)


def test_a_checkpoint_of_another_model(cases):
    with pytest.raises(CheckpointError, match="is another model"):
        from bridges.megatron import weights

        c = cases("qwen3")
        weights.load_hf(model.build(c.config, c.params), cases("qwen2").path, c.config)


def test_megatron_missing_or_of_another_version(monkeypatch):
    monkeypatch.setattr(start, "VERSION", "0.20.0")
    with pytest.raises(Unavailable, match=r"megatron-core 0\.19\.2.* is installed; .* against 0\.20\.0"):
        start.megatron()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(Unavailable, match="megatron-core is not installed"):
        start.megatron()


def test_a_processor_no_contract_covers(cases):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    tokens, labels, mask = padded(c.sequences[:2])
    foreign = lambda *, hidden_states, **_: hidden_states.sum()
    trainer(tokens, None, mask, labels=labels, output_processor=foreign)
    installed: Any = object()
    trainer.adapter = installed
    with pytest.raises(Unsupported, match="no contract covers"):
        trainer(tokens, None, mask, labels=labels, output_processor=foreign)
    trainer(tokens, None, mask, labels=labels, output_processor=LogProbs(trainer.runtime, "trainer_fwd"))
