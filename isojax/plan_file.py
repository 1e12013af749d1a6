"""Compiled kernel plans as bytes: JSON, then the machine code and constants that it points into; no pickle."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from isojax import kernel_plan as plans
from isojax.aot import Binary
from isojax.host_code import Address, Descriptor, HostCode


def dump(plan: plans.KernelPlan) -> bytes:
    """The plan's bytes. Its kernels must be compiled: a Launch of a Mosaic module raises TypeError."""
    blobs: list[bytes] = []

    def blob(data: bytes) -> list[int]:
        blobs.append(data)
        return [sum(map(len, blobs[:-1])), len(data)]

    def op(x: Any) -> dict[str, Any]:
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        if isinstance(x, plans.Launch):
            if not isinstance(x.module, Binary):
                raise TypeError("only compiled kernels are kept")
            host = dataclasses.asdict(x.module.host)
            fields["module"] = dict(cubin=blob(x.module.cubin), name=x.module.name, host=host)
        if isinstance(x, plans.Constant):
            fields["data"] = [str(x.data.dtype), x.data.shape, blob(x.data.tobytes())]
        return fields | {"op": type(x).__name__}

    head = dict(
        region=plan.region,
        arguments=plan.arguments,
        buffers=[[b.shape, b.dtype] for b in plan.buffers],
        ops=[op(x) for x in plan.ops],
        returns=plan.returns,
    )
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(blobs)


def load(data: bytes) -> plans.KernelPlan:
    """The plan of such bytes. They come from isojax.store, which has checked them."""
    n = int.from_bytes(data[:8], "little")
    head, blobs = json.loads(data[8 : 8 + n]), data[8 + n :]
    cut = lambda at: blobs[at[0] : at[0] + at[1]]

    def op(x: dict[str, Any]) -> Any:
        kind = getattr(plans, x.pop("op"))
        if kind is plans.Launch:
            code = x["module"]
            x["module"] = Binary(cut(code["cubin"]), code["name"], _host(code["host"]))
            x |= dict(operands=tuple(x["operands"]), outs=tuple(x["outs"]), aliases=tuple(map(tuple, x["aliases"])))
        if kind is plans.Constant:
            dtype, shape, at = x["data"]
            x["data"] = np.frombuffer(cut(at), dtype).reshape(shape)
        return kind(**x)

    return plans.KernelPlan(
        head["region"],
        head["arguments"],
        tuple(plans.Buffer(tuple(shape), dtype) for shape, dtype in head["buffers"]),
        tuple(op(x) for x in head["ops"]),
        tuple(head["returns"]),
    )


def _host(x: dict[str, Any]) -> HostCode:
    descriptors = tuple(
        Descriptor(
            d["at"],
            Address(*d["base"]),
            d["element"],
            tuple(d["sizes"]),
            tuple(d["strides"]),
            d["swizzle"],
            tuple(d["window"]),
        )
        for d in x["descriptors"]
    )
    params = tuple(p if isinstance(p, int) else Address(*p) for p in x["params"])
    return HostCode(x["area"], descriptors, tuple(x["dims"]), x["smem"], x["pdl"], params)
