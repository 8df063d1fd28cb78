"""How kernels that `torch.compile` makes for a GPU round, on any device: a backend for `torch.compile`.

What a kernel computes stays in float32 within it and is rounded to 16 bits where it is stored. So what the forward pass
goes on with, and what it leaves to the backward pass, need not be the same number. (On a CPU they are.)
"""

from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

aten = torch.ops.aten
# Beside what torch says is pointwise.
IN_KERNELS = {
    torch.ops.prims.convert_element_type.default, aten.amax.default, aten.sum.dim_IntList, aten.view.default,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default,
}  # fmt: skip


class FusedRounding(fx.Interpreter):
    """Runs a graph as if all neighbours that can be in one kernel were."""

    def run_node(self, n: fx.Node) -> Any:
        """As is, but for 16 bits in kernels, which are float32."""
        if n.op == "output":
            return tuple(_round(self.env[one], one) if isinstance(one, fx.Node) else one for one in n.args[0])
        if n.op != "call_function":
            return super().run_node(n)
        in_kernel = n.target in IN_KERNELS or torch.Tag.pointwise in getattr(n.target, "tags", ())
        prepare = _widen if in_kernel else _round
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda one: prepare(self.env[one], one))
        if n.target is torch.ops.prims.convert_element_type.default and args[1].itemsize == 2:
            return args[0]
        return n.target(*args, **kwargs)


def _round(value: Any, node: fx.Node) -> Any:
    return value.to(node.meta["val"].dtype) if isinstance(value, Tensor) else value


def _widen(value: Any, node: fx.Node) -> Any:
    is_half = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() == 2
    return value.float() if is_half else value


def _compile(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
    return make_boxed_func(FusedRounding(graph).run)


fused_rounding = aot_autograd(
    fw_compiler=_compile,
    bw_compiler=_compile,
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)
