"""Log-probabilities from hidden states, by head.logprob: [T, V] is never formed.

The case is named by the caller, never guessed from the grad mode: under recompute a gradient-carrying forward runs with
gradients off.
"""

from __future__ import annotations

from typing import Any

import torch

from bridges.megatron.call import Call
from bridges.megatron.layer import run_pre_hooks
from bridges.megatron.rows import Rows
from bridges.megatron.runtime import Runtime
from isojax.errors import InputError
from isojax.pallas_kernels import head

CASES = ("trainer_fwd", "trainer_score")
Temperature = float | torch.Tensor


class LogProbs:
    """An `output_processor` for GPTModel: [B, S] fp32 log-probabilities of the labels, 0 where there is no token.

    Args:
      runtime: the model's.
      case: 'trainer_fwd' (gradient-carrying) or 'trainer_score' (without gradients).
      temperature: a number, or a tensor that broadcasts to [B, S]; applied as one multiply by fp32 1/T.
      padding_mask: as given to the model, which does not hand it on.
    """

    def __init__(
        self,
        runtime: Runtime,
        case: str,
        temperature: Temperature = 1.0,
        padding_mask: torch.Tensor | None = None,
    ):
        check_case(case)
        self.runtime, self.case, self.temperature, self.padding_mask = runtime, case, temperature, padding_mask

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Raises: InputError for a label outside the vocabulary or a temperature that is not positive."""
        check_case(self.case)
        run_pre_hooks(output_layer)
        weight = output_layer.weight if output_weight is None else output_weight
        shape = tuple(hidden_states.shape[:2])
        rows = self.runtime.rows.find(shape, hidden_states.device, attention_mask, self.padding_mask, packed_seq_params)
        targets = rows.pack(transposed(labels, shape, "labels"))
        check_tokens(targets, self.runtime.config.vocab, "label")
        inverse = rows.pack(inverse_temperature(self.temperature, shape, hidden_states.device))
        out = self.runtime.logprob(rows.pack(hidden_states), weight, targets, inverse)
        return rows.unpack(out).t()


def check_case(case: str) -> None:
    """Raises InputError for an unknown case, or for trainer_fwd named while gradients are off."""
    if case not in CASES:
        raise InputError(f"case {case!r} is not a trainer's; name one of {', '.join(CASES)}")
    if case == "trainer_fwd" and not torch.is_grad_enabled():
        raise InputError("case trainer_fwd was named, but gradients are off; name trainer_score, or leave no_grad")


def transposed(x: torch.Tensor, shape: tuple[int, ...], name: str) -> torch.Tensor:
    """[B, S] -> [S, B], contiguous. Raises InputError for another shape."""
    if tuple(x.shape) != shape[::-1]:
        raise InputError(f"{name} have shape {tuple(x.shape)}; the micro-batch is [{shape[1]}, {shape[0]}]")
    return x.t().contiguous()


def check_tokens(ids: torch.Tensor, vocab: int, what: str) -> None:
    """Raises InputError for a token id outside the vocabulary, where a lookup would read another's memory.

    On CUDA it is an assertion on the device, as torch's own embedding has: the host would wait for the layers before.
    """
    low, high = ids.aminmax()
    if ids.is_cuda:
        message = f"{what}: no token id; allowed are 0 to {vocab - 1}"
        torch.ops.aten._assert_async.msg((low >= 0) & (high < vocab), message)
    elif low < 0 or high >= vocab:
        raise InputError(f"{what} {int(low if low < 0 else high)} is no token id; allowed are 0 to {vocab - 1}")


def inverse_temperature(temperature: Temperature, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """fp32 1/T per row, [S, B]. Raises InputError unless T > 0 (for a CUDA tensor: an assertion on the device)."""
    t = torch.as_tensor(temperature, dtype=torch.float32, device=device)
    positive = (t > 0).all() if isinstance(temperature, torch.Tensor) else temperature > 0
    if isinstance(positive, torch.Tensor) and positive.is_cuda:
        torch.ops.aten._assert_async.msg(positive, "temperature is not positive")
    elif not positive:
        raise InputError(f"temperature {temperature} is not positive; greedy decoding is compared at temperature 1")
    inverse = torch.ones_like(t) / t  # IEEE division on CPU and CUDA: the bits of numpy's 1 / T
    return inverse.expand(shape[::-1]).t().contiguous()


@torch.no_grad()
def vocabulary(
    runtime: Runtime, hidden: torch.Tensor, weight: torch.Tensor, rows: Rows, temperature: Temperature = 1.0
) -> list[torch.Tensor]:
    """Log-probabilities over the whole vocabulary after each token, [len, V] fp32 per sequence: for gates.

    The logits are the ones that head.logprob computed on its way (static emit_logits), not a second matmul.
    """
    inverse = rows.pack(inverse_temperature(temperature, rows.shape, hidden.device))
    h = rows.pack(hidden)
    targets = torch.zeros(rows.padded, dtype=torch.int32, device=hidden.device)
    out = _VOCABULARY(h, weight.detach(), targets, inverse)
    return list(out[: sum(rows.lens)].split(list(rows.lens)))


def _vocabulary(hidden: Any, weight: Any, targets: Any, inverse: Any) -> Any:
    logits = head.logprob.all_outputs(hidden, weight, targets, inverse, emit_logits=True)[2]
    return head.logprob_rows(logits, inverse)


_VOCABULARY = Call(_vocabulary)
