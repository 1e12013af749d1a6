"""What the modules of one Megatron model share: the traced calls, and where each micro-batch's tokens lie."""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch
from flax import nnx

from bridges.megatron.call import Call
from bridges.megatron.rows import RowFinder, Rows
from bridges.torch_ops.compile import prepare
from isojax.errors import Unavailable
from isojax.model import dense
from isojax.model.config import DenseConfig
from isojax.model.weights import DTYPES
from isojax.pallas_kernels import embed, head, norms
from isojax.program import trace


class Runtime:
    """One per model. arch: 'cpu' or 'sm90', to refuse a machine of the other kind: Megatron uses a GPU where one is.

    Raises: Unavailable.
    """

    def __init__(self, config: DenseConfig, arch: str | None = None):
        self.config = config
        self.arch = "sm90" if torch.cuda.is_available() else "cpu"
        if arch not in (None, self.arch):
            raise Unavailable(f"arch {arch!r} was asked for; Megatron runs {self.arch} here; ask for that, or for none")
        self.rows = RowFinder(config, self.arch)
        self.layer = Call(_layer(config), diff=(0, 1))
        self.embed = Call(embed.lookup, diff=(0,))
        self.norm = norm(config.eps, config.zero_centered)
        self.logprob = Call(head.logprob, diff=(0, 1))

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.embed, self.layer, self.norm, self.logprob

    def prepare(self, tokens: int, packing: Any, device: torch.device) -> None:
        """Compile forward and backward of a packed micro-batch, so that the first step does not wait for it.

        tokens: its rows. packing: PackedSeqParams; other cuts into as many sequences need no compilation of their own.
        """
        jobs = self.jobs(self.rows.find((tokens, 1), device, packed_seq_params=packing))
        prepare([p for call, args in jobs for p in call.programs(*args)], self.arch, device)
        for call, args in jobs:
            call.prepare(*args, device=device)

    def jobs(self, rows: Rows) -> list[tuple[Call, tuple[Any, ...]]]:
        """Every call of a step over these rows, with meta tensors for what it is given."""
        c = self.config
        meta = lambda *shape, dtype=DTYPES[c.dtype]: torch.empty(shape, dtype=dtype, device="meta")
        ids, inverse = meta(rows.padded, dtype=torch.int64), meta(rows.padded, dtype=torch.float32)
        table, hidden = meta(c.vocab, c.hidden), meta(rows.padded, c.hidden)
        weights = {name: meta(*spec.shape) for name, spec in _layer_state(c)[1].items()}
        return [
            (self.embed, (table, ids)),
            (self.layer, (hidden, weights, rows.batch)),
            (self.norm, (hidden, meta(c.hidden))),
            (self.logprob, (hidden, table, ids, inverse)),
        ]

    def compiled_regions(self) -> list[str]:
        """Names of the regions in the forwards that were compiled so far: what has really run."""
        return sorted({name for call in self.calls for f in call.forwards() for name in f.program.regions()})

    def regions(self) -> list[str]:
        """Names of the regions of a forward, each once: what a contract has to cover."""
        c, dtype = self.config, jax.numpy.dtype(self.config.dtype)
        spec = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
        ints = lambda *shape: spec(*shape, dtype=jax.numpy.int32)
        t, r = 64, 8
        rope = spec(c.positions, c.head_dim, dtype=jax.numpy.float32)
        batch = dense.Batch(ints(t), ints(r + 1), ints(r), ints(t, 2), rope)
        _, weights = _layer_state(c)
        hidden, inverse = spec(t, c.hidden), spec(t, dtype=jax.numpy.float32)
        programs = (
            trace(embed.lookup, spec(c.vocab, c.hidden), ints(t)),
            trace(_layer(c), hidden, weights, batch),
            trace(functools.partial(norms.rms, eps=c.eps, zero_centered=c.zero_centered), hidden, spec(c.hidden)),
            trace(head.logprob, hidden, spec(c.vocab, c.hidden), ints(t), inverse),
        )
        return sorted({name for p in programs for name in p.regions()})


@functools.cache
def norm(eps: float, zero_centered: bool) -> Call:
    """norms.rms(x [T, D], weight [D])."""
    return Call(functools.partial(norms.rms, eps=eps, zero_centered=zero_centered), diff=(0, 1))


def _layer_state(config: DenseConfig) -> tuple[Any, dict[str, Any]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: dense.Layer(config)))
    return graph, {str(k[0]): v.get_value() for k, v in nnx.to_flat_state(state)}


def _layer(config: DenseConfig) -> Any:
    graph, _ = _layer_state(config)

    def boundary(h: Any, weights: dict[str, Any], batch: Any) -> Any:
        layer = nnx.merge(graph, nnx.from_flat_state([((k,), nnx.Param(v)) for k, v in weights.items()]))
        return layer.boundary(h, batch)

    return boundary
