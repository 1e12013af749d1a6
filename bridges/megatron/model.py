"""A Megatron GPTModel whose arithmetic is IsoJAX's: embedding, layers, final norm and log-probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from bridges.megatron import adapter, logprob, weights
from bridges.megatron.config import transformer_config
from bridges.megatron.layer import run_pre_hooks
from bridges.megatron.logprob import LogProbs, Temperature
from bridges.megatron.runtime import Runtime
from bridges.megatron.spec import block_spec
from contract import Adapter, Contract
from isojax.errors import Unsupported
from isojax.model import weights as checkpoints
from isojax.model.config import DenseConfig


class IsoGPTModel(GPTModel):
    """Called as GPTModel is; with labels it returns -log-probabilities, [B, S] fp32, from head.logprob.

    Logits are never formed. `case` is the case of a plain call; a caller that evaluates names 'trainer_score' there.
    """

    def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.runtime = runtime
        self.case = "trainer_fwd"
        self.adapter: Adapter | None = None  # set by bridges.megatron.adapter.install
        if self.share_embeddings_and_output_weights:
            # Embedding and LogProbs both add to main_grad; DDP need not add what autograd gets in its place.
            self.head_weight.zero_out_wgrad = False  # type: ignore[attr-defined]

    # -- as Megatron calls it -----------------------------------------------------------------------------------------
    def _preprocess(
        self,
        input_ids: torch.Tensor,
        position_ids: Any = None,
        decoder_input: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if decoder_input is None and self.pre_process:
            logprob.check_tokens(input_ids, self.runtime.config.vocab, "token")
            table = self.embedding.word_embeddings
            run_pre_hooks(table)
            b, s = input_ids.shape
            rows = self.runtime.rows.find((s, b), input_ids.device)  # every place: a padding token has a row as well
            tokens = logprob.transposed(input_ids, (s, b), "tokens")
            decoder_input = rows.unpack(self.runtime.embed(table.weight, rows.pack(tokens)))
        kwargs["decoder_input"] = decoder_input
        return super()._preprocess(input_ids, position_ids, **kwargs)

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("output_processor")
        foreign = given is not None and given is not _hidden and not isinstance(given, LogProbs)
        if foreign and self.adapter is not None:
            raise Unsupported("IsoGPTModel under contract", repr(given), "LogProbs", "no contract covers what it does")
        if self.share_embeddings_and_output_weights and given is not None and not isinstance(given, LogProbs):
            # Who takes the hidden states may use the shared weight with autograd: from now on DDP adds what it gives.
            self.head_weight.zero_out_wgrad = True  # type: ignore[attr-defined]
        if not self.post_process or given is not None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        if kwargs.get("labels") is None:
            raise Unsupported("IsoGPTModel", "no labels", "labels, [B, S]", "call logprobs() or vocabulary_logprobs()")
        kwargs["output_processor"] = LogProbs(self.runtime, self.case, 1.0, kwargs.get("padding_mask"))
        return -super()._postprocess(hidden_states, *args, **kwargs)

    # -- as a policy ---------------------------------------------------------------------------------------------------
    def hidden(self, tokens: torch.Tensor, **masks: Any) -> torch.Tensor:
        """Normalised final hidden states [S, B, D] of tokens [B, S]; zeros where there is no token.

        masks: attention_mask, padding_mask or packed_seq_params, as RowFinder.find takes them.
        """
        mask = masks.pop("attention_mask", None)
        return self(tokens, None, mask, output_processor=_hidden, **masks)

    def logprobs(
        self, tokens: torch.Tensor, labels: torch.Tensor, *, case: str, temperature: Temperature = 1.0, **masks: Any
    ) -> torch.Tensor:
        """Log-probability of each label after its token: [B, S] fp32, 0 where there is no token.

        Args:
          tokens, labels: [B, S] token ids; labels[:, t] is the token that follows tokens[:, t].
          case: 'trainer_fwd' or 'trainer_score'; the latter runs without gradients.
          temperature: a number, or a tensor that broadcasts to [B, S].
          masks: attention_mask, padding_mask or packed_seq_params.

        Raises: InputError (token ids, masks, case), Unsupported.
        """
        with torch.no_grad() if case == "trainer_score" else contextlib.nullcontext():
            processor = LogProbs(self.runtime, case, temperature, masks.get("padding_mask"))
            mask = masks.pop("attention_mask", None)
            return self(tokens, None, mask, labels=labels, output_processor=processor, **masks)

    @torch.no_grad()
    def vocabulary_logprobs(
        self, tokens: torch.Tensor, *, temperature: Temperature = 1.0, **masks: Any
    ) -> list[torch.Tensor]:
        """Log-probabilities over the whole vocabulary after each token, [len, V] fp32 per sequence: for gates."""
        hidden = self.hidden(tokens, **masks)
        rows = self.runtime.rows.find(tuple(hidden.shape[:2]), hidden.device, **masks)
        return logprob.vocabulary(self.runtime, hidden, self.head_weight, rows, temperature)

    @property
    def head_weight(self) -> torch.Tensor:
        """[V, D]: the output layer's, or the embedding's where they are tied."""
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None  # a pipeline stage without a head has no log-probabilities either
        return weight


def _hidden(*, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    return hidden_states


def build(
    config: DenseConfig,
    params: Mapping[str, torch.Tensor] | None = None,
    *,
    arch: str | None = None,
    contract: Contract | str | Path | None = None,
    identities: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> IsoGPTModel:
    """A model on this machine's device. Call `start.single` first, or initialise Megatron yourself.

    Args:
      params: packed parameters (isojax.model.weights), copied; Megatron's own initialisation where None.
      contract, identities: see bridges.megatron.adapter.install.
      overrides: TransformerConfig fields, such as recompute_granularity="full".

    Raises: Unsupported, naming a field that this bridge does not run; CheckpointError; AdapterRefusal, ContractError.
    """
    runtime = Runtime(config, arch)
    fields = {"perform_initialization": params is None} | overrides
    model = IsoGPTModel(
        transformer_config(config, **fields),
        block_spec(config, runtime),
        vocab_size=config.vocab,
        max_sequence_length=config.positions,
        position_embedding_type="none",  # attn.prep rotates; Megatron's own tables would be made for nothing
        share_embeddings_and_output_weights=config.tied,
        runtime=runtime,
    )
    if params is not None:
        weights.load_packed(model, params, config)
    if contract is not None:
        adapter.install(model, contract, identities=identities)
    return model.cuda() if torch.cuda.is_available() else model


def load(path: str | Path, dtype: str = "bfloat16", **kwargs: Any) -> IsoGPTModel:
    """Build from a Hugging Face checkpoint folder or a GGUF file. Raises: CheckpointError, ConfigError, Unsupported."""
    config, params = checkpoints.load(path, dtype)
    return build(config, params, **kwargs)
