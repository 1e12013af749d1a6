"""Collectives of a Program over torch process groups. Only bytes move: no transport may touch a value.

Works over gloo and nccl. A rule gets the step, the device and the group of each named axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from isojax.errors import Refused, Unavailable
from isojax.program import Step

Groups = Mapping[str, dist.ProcessGroup]


def group_of(step: Step, groups: Groups) -> dist.ProcessGroup:
    """The process group of the one axis that a collective runs over. Raises Refused or Unavailable."""
    axis = step.params["axis_name"]
    names = axis if isinstance(axis, tuple) else (axis,)
    if len(names) != 1 or step.params.get("axis_index_groups") is not None:
        raise Refused(f"{step.name} at {step.where}: over {names} with index groups; use one whole named axis")
    if names[0] not in groups:
        have = ", ".join(groups) or "none"
        raise Unavailable(
            f"{step.name} at {step.where} needs a process group for axis {names[0]!r}; given {have}; "
            "pass groups={axis: group} to compile_program"
        )
    return groups[names[0]]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def all_gather(s: Step, device: torch.device, groups: Groups) -> Callable[..., Any]:
    group, axis, tiled = group_of(s, groups), s.params["all_gather_dimension"], s.params["tiled"]
    n = dist.get_world_size(group)

    def gather(x):
        raw = _bytes(x)
        out = torch.empty(n * raw.numel(), dtype=torch.uint8, device=x.device)
        dist.all_gather_into_tensor(out, raw, group=group)
        parts = out.view(x.dtype).reshape(n, *x.shape).unbind(0)
        return torch.cat(parts, axis) if tiled else torch.stack(parts, axis)

    return gather


def all_to_all(s: Step, device: torch.device, groups: Groups) -> Callable[..., Any]:
    group, split, concat = group_of(s, groups), s.params["split_axis"], s.params["concat_axis"]
    n = dist.get_world_size(group)
    if not s.params["tiled"]:
        raise Refused(f"all_to_all at {s.where}: use tiled=True")

    def exchange(x):
        sent = torch.stack(x.chunk(n, split))
        got = torch.empty_like(sent)
        dist.all_to_all_single(_bytes(got), _bytes(sent), group=group)
        return torch.cat(got.unbind(0), concat)

    return exchange


def ppermute(s: Step, device: torch.device, groups: Groups) -> Callable[..., Any]:
    group, pairs = group_of(s, groups), s.params["perm"]
    me = dist.get_rank(group)
    to, source = [b for a, b in pairs if a == me], [a for a, b in pairs if b == me]

    def permute(x):
        if to == source == [me]:
            return x.clone()
        sent, got = _bytes(x), torch.zeros(x.shape, dtype=x.dtype, device=x.device)  # whom nobody sends to gets zeros
        ops = [dist.P2POp(dist.isend, sent, group=group, group_peer=b) for b in to]
        ops += [dist.P2POp(dist.irecv, _bytes(got), group=group, group_peer=a) for a in source]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return got

    return permute


def axis_index(s: Step, device: torch.device, groups: Groups) -> Callable[..., Any]:
    rank = torch.tensor(dist.get_rank(group_of(s, groups)), dtype=torch.int32, device=device)
    return lambda: rank


COLLECTIVES = {"all_gather": all_gather, "all_to_all": all_to_all, "ppermute": ppermute, "axis_index": axis_index}
