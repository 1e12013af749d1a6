"""IsoJAX in torch: Programs and regions as torch functions, on CPU and on Hopper."""

from __future__ import annotations

from bridges.torch_ops.autograd import LayerFunction, cast_to_leaf, diff_positions, layer_function
from bridges.torch_ops.compile import Compiled, compile_program, narrow, prepare
from bridges.torch_ops.ops import region_op

__all__ = [
    "Compiled",
    "LayerFunction",
    "cast_to_leaf",
    "compile_program",
    "diff_positions",
    "layer_function",
    "narrow",
    "prepare",
    "region_op",
]
