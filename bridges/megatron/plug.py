"""One region in a stock Megatron spec: `spec = plug(spec, "input_layernorm", call)`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from isojax.errors import InputError


def plug(spec: Any, path: str, call: Callable[..., Any]) -> Any:
    """A copy of `spec` in which the module at `path` runs `call`.

    Args:
      spec: a layer's ModuleSpec (get_gpt_layer_local_spec, say), or a block's TransformerBlockSubmodules: then every
        layer is changed, or the final norm for the path 'layer_norm'.
      path: names of the spec's own fields, as in 'input_layernorm' or 'mlp.linear_fc2'.
      call: `call(module, *args)` with the stock module, which holds the parameters, and its forward's arguments; its
        result is the forward's. bridges.torch_ops.region_op makes a region into a torch function with gradients.

    Raises: InputError where the spec has no module there.
    """
    if isinstance(spec, TransformerBlockSubmodules) and path != "layer_norm":
        layers = [plug(layer, path, call) for layer in spec.layer_specs or ()]
        return dataclasses.replace(spec, layer_specs=layers)
    return _changed(spec, path.split("."), path, call)


def _changed(spec: Any, names: list[str], path: str, call: Callable[..., Any]) -> Any:
    parts = _submodules(spec)
    fields = [f.name for f in dataclasses.fields(parts)] if dataclasses.is_dataclass(parts) else []
    here = getattr(parts, names[0], None) if names[0] in fields else None
    if here is None or here is IdentityOp or here is IdentityFuncOp:
        used = [f for f in fields if getattr(parts, f) not in (None, IdentityOp, IdentityFuncOp)]
        raise InputError(f"the spec has no module {path!r}; at {names[0]!r} it has {', '.join(used) or 'none'}")
    assert parts is not None and not isinstance(parts, type)
    new = _changed(here, names[1:], path, call) if len(names) > 1 else _plugged(here, call)
    return _with_submodules(spec, dataclasses.replace(parts, **{names[0]: new}))


def _submodules(spec: Any) -> Any:
    if isinstance(spec, TransformerBlockSubmodules):
        return spec
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def _with_submodules(spec: Any, parts: Any) -> Any:
    if isinstance(spec, TransformerBlockSubmodules):
        return parts
    if isinstance(spec, functools.partial):
        return functools.partial(spec.func, *spec.args, **(spec.keywords | {"submodules": parts}))
    return dataclasses.replace(spec, submodules=parts)


def _plugged(builder: Any, call: Callable[..., Any]) -> Any:
    """A builder that makes what `builder` makes, and gives it another forward."""
    if isinstance(builder, ModuleSpec):
        if not isinstance(builder.module, type):
            raise InputError(f"{builder.module} is not a module class; plug one of its own parts")
        return dataclasses.replace(builder, module=_subclass(builder.module, call))
    if isinstance(builder, type):
        return _subclass(builder, call)

    def build(*args: Any, **kwargs: Any) -> Any:
        return _bound(builder(*args, **kwargs), call)

    return build


def _subclass(kind: type, call: Callable[..., Any]) -> type:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return _bound(kind(*args, **kwargs), call)

    # A class, because Megatron takes types apart from functions; its instances are plain instances of `kind`, whose
    # __new__ may itself return something else (WrappedTorchNorm gives a torch.nn.RMSNorm).
    return type(f"Plugged{kind.__name__}", (), {"__new__": new})


def _bound(module: Any, call: Callable[..., Any]) -> Any:
    module.forward = functools.partial(call, module)
    return module
