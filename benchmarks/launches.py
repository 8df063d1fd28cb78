"""What early launches are worth for one image: kernels launched while the one before them drains, and as usual.

    python benchmarks/launches.py
    python benchmarks/launches.py --compile --seconds 2

Modules in a row at the maps of GSA-ResNet-50's four groups, and the network itself, for inference in bfloat16, each as
CUDA graphs that are captured and timed in one process, in turns: with early launches and without, and both without a
second stream for the context vectors (`gsanet/functional/fused/beside.py`). Times are of one replay behind the other.
It says how many of a graph's edges let the second kernel begin early, and whether all sides give the same bits. Needs a
GPU; early launches begin with compute capability 9.0.
"""

import argparse
import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from measure import compiled, images, measure
from networks import infer
from registry import Setting
from torch import Tensor, nn

import gsanet
from gsanet.bench import environment
from gsanet.functional.fused import beside
from gsanet.functional.fused.dependent import dependent_launches

MAPS = {(56, 56): 64, (28, 28): 128, (14, 14): 256, (7, 7): 512}
MODULES = 8  # in a row
REPLAYS = 10  # timed together
# Whether kernels are launched early, and whether there is a second stream.
SIDES = {
    "usual": (False, True),
    "early": (True, True),
    "usual, one stream": (False, False),
    "early, one stream": (True, False),
}


class Captured:
    """A network as a CUDA graph.

    Args:
        network: The network.
        x: Its input, whose memory the graph reads.
        early: Launch kernels early.
        streams: Whether the network may use a second stream.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], x: Tensor, early: bool, streams: bool):
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with ExitStack() as stack:
            stack.enter_context(dependent_launches(early))
            if not streams:
                stack.enter_context(mock.patch.object(beside, "FEW", 0))
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self.out = infer(network, x)
        self.edges = edges(self.graph.raw_cuda_graph())
        self.graph.instantiate()

    def __call__(self) -> None:
        """Replay it."""
        self.graph.replay()


class Edge(ctypes.Structure):
    """The driver's CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def edges(graph: int) -> str:
    """How many edges a graph has, and how many of them let the second kernel begin early."""
    # Not by the bindings: before version 13.3 they give what has been freed.
    get = driver().cuGraphGetEdges_v2
    count, handle = ctypes.c_size_t(), ctypes.c_void_p(graph)
    status = get(handle, None, None, None, ctypes.pointer(count))
    nodes, found = (ctypes.c_void_p * count.value * 2)(), (Edge * count.value)()
    status = status or get(handle, nodes[0], nodes[1], found, ctypes.pointer(count))
    return f"error {status}" if status else f"{sum(edge.type != 0 for edge in found)} of {len(found)} edges"


def driver() -> Any:
    """The library of the driver, which torch has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def compare(what: str, network: Callable[[Tensor], Tensor], x: Tensor, setting: Setting, parts: int = 1) -> None:
    """Print the times of all sides, in microseconds for each of so many parts."""
    for _ in range(3):
        infer(network, x)  # compiles, and chooses algorithms
    runs = {side: Captured(network, x, *how) for side, how in SIDES.items()}
    found = measure({side: partial(_as_mode, run) for side, run in runs.items()}, setting, repeats=REPLAYS)
    same = True
    for _ in range(20):
        x.normal_()
        for run in runs.values():
            run()
        first, *others = (run.out for run in runs.values())
        same = same and all(torch.equal(first, other) for other in others)
    times = ", ".join(f"{side} {1e3 * time / parts:.1f} ({runs[side].edges})" for side, time in found.times.items())
    errors = "".join(f"; {side}: {error}" for side, error in found.errors.items())
    print(f"{what}: {times} us; bits {'the same' if same else 'DIFFER'}{errors}", flush=True)


def _as_mode(run: Captured) -> dict[str, Captured]:
    return {"CUDA graph": run}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare modules and the network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side")
    parser.add_argument("--compile", action="store_true", help="the network through torch.compile, as in run.py")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("early launches need a GPU")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    setting = Setting("cuda", torch.bfloat16, options.batch, options.seconds, options.compile)
    print(", ".join(f"{name} {value}" for name, value in environment("cuda").items()))
    for size, channels in MAPS.items():
        modules = nn.Sequential(*(gsanet.GlobalSelfAttention(channels, feat_size=size) for _ in range(MODULES)))
        x = torch.randn(options.batch, channels, *size, device="cuda").bfloat16()
        x = x.to(memory_format=torch.channels_last)
        network = gsanet.fuse_for_inference(modules.eval()).to("cuda", torch.bfloat16)
        compare(f"one of {MODULES} modules, {size[0]}x{size[1]}x{channels}", network, x, setting, MODULES)
    model = gsanet.fuse_for_inference(gsanet.create_model("gsa_resnet50").eval())
    model = model.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    x = images(setting, options.batch, setting.img_size, setting.dtype)
    compare("GSA-ResNet-50", compiled(model, setting), x, setting)


if __name__ == "__main__":
    main()
