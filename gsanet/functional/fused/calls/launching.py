"""From a plan to the GPU: kernels are started where their tensors are, or only noted, to be compiled ahead."""

import threading
from collections.abc import Callable
from ctypes import Structure

import torch
from torch import Tensor

from gsanet.functional.fused.compiler import architecture_of, compile_all, load_kernel
from gsanet.functional.fused.plan import Launch, Machine, machine_of


def launch(plan: Launch, values: Structure, device: torch.device) -> None:
    """Start a kernel on the current stream."""
    kernel = load_kernel(plan.kernel, device, plan.carveout)
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch((*plan.grid, 1), plan.threads, plan.shared_bytes, values, stream)


def machine(device: torch.device) -> Machine:
    """The GPU that plans are made for."""
    return machine_of(device)


def compile_ahead(device: torch.device, run: Callable[[], object]) -> None:
    """Compile all kernels that a function of meta tensors would launch on a device, many at a time."""
    plans: list[Launch] = []
    with _recording:
        _recorders.append((device, plans))
        try:
            run()
        finally:
            _recorders.pop()
    compile_all((plan.kernel for plan in plans), architecture_of(device))


_recording = threading.Lock()
_recorders: list[tuple[torch.device, list[Launch]]] = []


def start(plan: Launch, values: Structure, tensor: Tensor) -> None:
    """Start a kernel where a tensor is, or note it for `compile_ahead`."""
    if tensor.is_meta:
        _recorders[-1][1].append(plan)
    else:
        launch(plan, values, tensor.device)


def machine_for(tensor: Tensor) -> Machine:
    """The GPU that kernels of a tensor are planned for."""
    return machine(_recorders[-1][0] if tensor.is_meta else tensor.device)
