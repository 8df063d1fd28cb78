"""Forward and backward pass of a batch as a CUDA graph.

Small images leave a GPU waiting: to launch a thousand kernels one by one takes a host longer than the GPU needs for
them. A graph launches them all at once. It reads the batch from the same memory at each step and leaves the gradients
in the same memory, so the gradients stay where they are between steps, and each step writes over them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Runs before the capture: the first ones compile, choose kernels and make state.
WARM_UP = 3


class GraphedStep:
    """A function of a batch that computes gradients, captured when it is first called and replayed from then on.

    Args:
        network: Its buffers, such as running statistics, and its gradients are what the function changes.
        compute: From (images, labels) to the loss, gradients included. Always called with tensors of the same shapes.
        make_graph: What captures, and replays.
    """

    def __init__(
        self,
        network: nn.Module,
        compute: Callable[[Tensor, Tensor], Tensor],
        make_graph: Callable[[Callable[[], Tensor]], "Graph"] | None = None,
    ):
        self.network, self.compute = network, compute
        self.make_graph = make_graph or Graph
        self.graph: Graph | None = None
        self.batch: tuple[Tensor, Tensor]

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss; the gradients are those of this batch alone."""
        if self.graph is None:
            self.batch = images.clone(), labels.clone()
            self.graph = self._capture()
        for kept, new in zip(self.batch, (images, labels), strict=True):
            if kept.shape != new.shape or kept.dtype != new.dtype:
                raise ValueError(f"a graph takes batches of one shape, {tuple(kept.shape)}, not {tuple(new.shape)}")
            kept.copy_(new)
        self.graph.replay()
        return self.graph.result.clone()

    def _capture(self) -> "Graph":
        """Nothing that was run before the first replay leaves a trace, so that a run stays a function of its recipe."""
        before = [buffer.clone() for buffer in self.network.buffers()]
        graph = self.make_graph(self._run)
        with torch.no_grad():
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
        return graph

    def _run(self) -> Tensor:
        for parameter in self.network.parameters():
            parameter.grad = None  # so that it is written, and not added to
        return self.compute(*self.batch).detach()


class Graph:
    """A function without arguments as a CUDA graph; `result` is what it returns, in the graph's own memory."""

    def __init__(self, run: Callable[[], Tensor]):
        random = torch.cuda.get_rng_state()
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.result = run()
        torch.cuda.set_rng_state(random)

    def replay(self) -> None:
        """Run it again."""
        self._graph.replay()
