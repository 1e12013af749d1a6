"""The other ways in: weights by name, single modules in a stock spec, a plugged region, a contract."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import contract as contracts
from bridges.megatron import adapter, model, plug, stock, weights
from bridges.megatron.config import transformer_config
from bridges.megatron.modules import IsoRMSNorm
from bridges.megatron.rows import RowFinder
from bridges.megatron.score import packed, padded
from bridges.megatron.spec import module_layer_spec
from bridges.torch_ops import region_op
from isojax import profile
from isojax.errors import InputError, Unavailable
from isojax.model import weights as checkpoints
from tests.integration import models
from tests.integration.megatron.conftest import bits
from tests.integration.megatron.test_parity import FULL


@pytest.mark.parametrize("family", models.FAMILIES)
def test_hugging_face_weights_in_and_out(cases, family):
    c = cases(family)
    trainer = model.build(c.config)
    weights.load_hf(trainer, c.path, c.config)
    out = weights.export_hf(trainer, c.config)
    original = dict(checkpoints.tensors(c.path, c.config))
    assert out.keys() == original.keys()
    assert all(torch.equal(out[n], original[n]) for n in out)


def test_parameters_have_the_names_that_megatron_bridge_maps(cases):
    c = cases("qwen3")
    found = {n for n, _ in model.build(c.config).named_parameters()}
    layer = {n.removeprefix("decoder.layers.0.") for n in found if n.startswith("decoder.layers.0.")}
    assert layer == {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    rest = {n for n in found if not n.startswith("decoder.layers.")}
    assert rest == {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}


def of_modules(config, params):
    """Megatron's own layers around IsoJAX modules."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [module_layer_spec(config.qk_norm)] * config.layers
    mixed = GPTModel(
        transformer_config(config, use_te_activation_func=True),
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=IsoRMSNorm),  # pyright: ignore[reportArgumentType]
        vocab_size=config.vocab,
        max_sequence_length=config.positions,
        position_embedding_type="rope",
        rotary_base=config.rope.theta,
        share_embeddings_and_output_weights=config.tied,
    )
    weights.load_packed(mixed, params, config)
    return mixed


def test_single_modules_in_megatrons_own_layer(cases):
    """Each module alone in Megatron's layer, against its stock layer, forward and gradients, in float32.

    Both are fp32 sums of K <= 512 terms in different orders: 2e-5 of the norm, as in test_gradients.
    """
    c = cases("qwen3")
    config, params = checkpoints.load(c.path, "float32")
    mixed = of_modules(config, params)
    peer = stock.stock_model(config, params)
    tokens, labels, _ = padded(c.sequences)
    s = tokens.shape[1]
    causal = ~torch.ones(1, 1, s, s, dtype=torch.bool).tril()
    positions = torch.arange(s).expand_as(tokens)
    grads = []
    for m in (mixed, peer):
        m(tokens, positions, causal, labels=labels).mean().backward()
        named = weights.names(config, stock=m is peer)
        grads.append({ours: m.get_parameter(theirs).grad for ours, theirs in named.items()})
    assert all((grads[0][n] - grads[1][n]).norm() < 2e-5 * grads[1][n].norm() for n in grads[1])


def test_core_attention_alone_takes_packed_sequences(cases):
    """Hidden states of a packed row have the bits of the padded micro-batch: every module is batch invariant."""
    c = cases("qwen3")
    mixed = of_modules(c.config, c.params)
    take = dict(output_processor=lambda *, hidden_states, **_: hidden_states)
    tokens, _, mask = padded(c.sequences)
    apart = mixed(tokens, torch.arange(16).expand_as(tokens), mask, **take)
    tokens, _, packing = packed(c.sequences)
    together = mixed(tokens, torch.arange(64)[None], None, packed_seq_params=packing, **take)[:, 0]
    rows = torch.cat([apart[: len(s), i] for i, s in enumerate(c.sequences)])
    assert (bits(rows) == bits(together)).all()


def test_hooks_of_the_modules_that_hold_parameters_run(cases):
    """DDP waits in them for parameters that are still being gathered."""
    c = cases("qwen3")
    trainer = model.build(c.config, c.params)
    holders = [m for m in trainer.modules() if any(True for _ in m.parameters(recurse=False))]
    seen = set()
    for m in holders:
        m.register_forward_pre_hook(lambda m, args: seen.add(m))
    tokens, labels, mask = padded(c.sequences)
    trainer(tokens, None, mask, labels=labels)
    assert seen == set(holders)


def test_rows_are_found_once_for_all_layers_and_their_recomputation(cases, monkeypatch):
    c = cases("qwen3")
    trainer = model.build(c.config, c.params, **FULL)
    made = []
    original = RowFinder._make
    monkeypatch.setattr(RowFinder, "_make", lambda self, *a: made.append(a) or original(self, *a))
    tokens, labels, mask = padded(c.sequences)
    trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask).sum().backward()
    assert len(made) == 2  # of the mask, and of every place for the embedding
    mask[0, -1] = mask[0, -1]  # written to: nobody knows that it is the same
    trainer.logprobs(tokens, labels, case="trainer_fwd", attention_mask=mask)
    assert len(made) == 3


def norm_call(module, x):
    """A user's function: a region in place of a stock module."""
    return region_op("norms.rms")(x.reshape(-1, x.shape[-1]), module.weight, eps=module.eps).reshape(x.shape)


def test_a_region_plugged_into_a_stock_spec(cases):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    c = cases("qwen2")
    seen = []

    def call(module, x):
        y = norm_call(module, x)
        seen.append((x.detach(), module.weight.detach(), y))
        return y

    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec = plug.plug(spec, "input_layernorm", call)  # the one line
    config = transformer_config(c.config, num_layers=2)
    m = GPTModel(config, spec, vocab_size=512, max_sequence_length=64, position_embedding_type="rope").bfloat16()
    tokens, labels, _ = padded(c.sequences)
    s = tokens.shape[1]
    causal = ~torch.ones(1, 1, s, s, dtype=torch.bool).tril()
    m(tokens, torch.arange(s).expand_as(tokens), causal, labels=labels).mean().backward()
    assert len(seen) == 2  # one a layer
    for x, weight, y in seen:
        again = region_op("norms.rms")(x.reshape(-1, 256), weight, eps=config.layernorm_epsilon).reshape(x.shape)
        assert (bits(y) == bits(again)).all()
    grad = m.get_parameter("decoder.layers.0.input_layernorm.weight").grad
    assert grad is not None and grad.abs().sum() > 0


def test_plug_finds_nested_modules_and_names_what_there_is():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    spec: Any = get_gpt_layer_local_spec(normalization="RMSNorm")
    new = plug.plug(spec, "mlp.linear_fc2", norm_call)
    assert new.submodules.mlp.keywords["submodules"].linear_fc2.__name__ == "PluggedRowParallelLinear"
    assert spec.submodules.mlp.keywords["submodules"].linear_fc2.__name__ == "RowParallelLinear"
    block = TransformerBlockSubmodules([spec, spec], IsoRMSNorm)
    assert plug.plug(block, "layer_norm", norm_call).layer_norm.__name__ == "PluggedIsoRMSNorm"
    assert all(
        s.submodules.self_attention.module.__name__ == "PluggedSelfAttention"
        for s in plug.plug(block, "self_attention", norm_call).layer_specs
    )
    for path in ("cross_attention", "no_such", "mlp.no_such", "input_layernorm.weight"):
        with pytest.raises(InputError, match=f"no module '{path}'"):
            plug.plug(spec, path, norm_call)


def test_the_contract_is_installed_before_the_first_forward(cases):
    c = cases("qwen3")
    held = profile.build("dense", "cpu")
    trainer = model.build(c.config, c.params, contract=held, identities=held.identities.plain())
    assert trainer.adapter is not None
    install, handshake = trainer.adapter.ledger.records
    pairs = {(region, case) for region, case in install.data["regions"]}
    assert pairs == {(r, c) for r in trainer.runtime.regions() for c in ("trainer_fwd", "trainer_score")}
    assert handshake.event == "handshake"


@pytest.mark.parametrize("wrong", ["identity", "region", "degree", "arch"])
def test_a_contract_that_does_not_fit_is_refused(cases, monkeypatch, wrong):
    c = cases("qwen3")
    held = profile.build("dense", "cpu")
    build = functools.partial(model.build, c.config, c.params, contract=held)
    if wrong == "identity":
        other = held.identities.plain() | {"numerical_policy": "0" * 64}
        with pytest.raises(contracts.AdapterRefusal, match="numerical_policy"):
            build(identities=other)
    elif wrong == "region":
        short = contracts.seal(
            held.evolve(composition=[e for e in held.composition if e.region != "residual.add"], identities=None)
        )
        with pytest.raises(contracts.AdapterRefusal, match=r"residual\.add"):
            build(contract=short)
    elif wrong == "degree":
        monkeypatch.setattr(adapter, "degrees", lambda: dict(tp=2, pp=1, dp=1, cp=1, ep=1, sp=0))
        with pytest.raises(contracts.AdapterRefusal, match="axis tp"):
            build()
    else:
        entries = [e.evolve(impl=e.impl.evolve(arch="sm90")) for e in held.composition]
        other = contracts.seal(held.evolve(composition=entries, arch="sm90", identities=None))
        with pytest.raises(contracts.AdapterRefusal, match="arch sm90"):
            build(contract=other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU on a machine without one")
def test_sm90_asked_for_without_a_gpu(cases):
    c = cases("qwen3")
    with pytest.raises(Unavailable, match="arch 'sm90' was asked for; Megatron runs cpu here"):
        model.build(c.config, c.params, arch="sm90")
