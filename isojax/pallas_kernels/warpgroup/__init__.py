"""Steps of one warpgroup written below Pallas, for what Pallas cannot say: products left in flight, one rounding named
per instruction, a copy of many boxes behind one arrival. No kernel family: attention's kernels are made of these.

registers   how values lie in registers, as scalars      products   begun on the tensor cores, settled later
softmax     its steps on 64 rows                         lines      the last of them on 128 elements, one a thread
private     kept in SMEM                                 memory     from GMEM and to it
turns       of two warpgroups

Each step has a substitute for Mosaic's GPU interpreter, which cannot run inline code; on a GPU the gates recheck them
(isojax.pallas_kernels.interpretable lists the others).
"""

from isojax.pallas_kernels.warpgroup.lines import LINE, fold_line, line, put_line
from isojax.pallas_kernels.warpgroup.memory import Index, arrivals, count_used, fetch, put_rows, put_state, warp
from isojax.pallas_kernels.warpgroup.private import fold, keep_rows, kept_rows, put
from isojax.pallas_kernels.warpgroup.products import begin_scores, begin_weighted, narrow, pin, settle
from isojax.pallas_kernels.warpgroup.registers import ACC, ROW
from isojax.pallas_kernels.warpgroup.softmax import (
    LOWEST,
    finish,
    full_row,
    meet,
    rescale,
    row_sum,
    visible,
    weigh_few,
    weigh_first,
    weigh_second,
    zeros,
)
from isojax.pallas_kernels.warpgroup.turns import pass_turn, take_turn, warpgroup_barrier

__all__ = [
    "ACC", "LINE", "LOWEST", "ROW", "Index", "arrivals", "begin_scores", "begin_weighted", "count_used", "fetch",
    "finish", "fold", "fold_line", "full_row", "keep_rows", "kept_rows", "line", "meet", "narrow", "pass_turn", "pin",
    "put", "put_line", "put_rows", "put_state", "rescale", "row_sum", "settle", "take_turn", "visible", "warp",
    "warpgroup_barrier", "weigh_few", "weigh_first", "weigh_second", "zeros",
]  # fmt: skip
