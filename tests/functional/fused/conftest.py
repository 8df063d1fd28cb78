"""Where the kernels run in the tests: on a GPU if there is one, and always on the host stand-in."""

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from functional.fused import host

from gsanet.functional import fused, use_backend
from gsanet.functional.backends import BACKENDS
from gsanet.functional.fused import available
from gsanet.functional.fused.calls import launching
from gsanet.functional.fused.compiler import unavailable
from gsanet.functional.fused.plan import Launch, Machine

HAS_GPU = torch.cuda.is_available() and unavailable(torch.device("cuda", 0)) is None
# Few multiprocessors: a block then has several lines to go through one after the other, as it has on large maps.
HOST_MACHINE = Machine(multiprocessors=3, shared_memory=227 * 1024, shared_memory_in_all=228 * 1024)


class Kernels:
    """The backend `fused` on some device, and what it launched."""

    def __init__(self, device: str):
        self.device = device
        self.order = "forward"  # of the host: see `host.launch`
        self.machine = HOST_MACHINE  # of the host
        self.launched: list[Launch] = []

    @property
    def entries(self) -> set[str]:
        """The names of the kernels that were launched."""
        return {plan.kernel.entry for plan in self.launched}

    def constants(self, entry: str) -> list[dict[str, int | str]]:
        """The constants of each launch of a kernel."""
        return [dict(plan.kernel.constants) for plan in self.launched if plan.kernel.entry == entry]

    def other_orders(self) -> Iterator[None]:
        """Once for each other order that the host knows; none on a GPU."""
        for order in ("reverse", "random:1") if self.device == "cpu" else ():
            self.order = order
            yield
        self.order = "forward"

    @contextlib.contextmanager
    def running(self, poison: bool = True) -> Iterator[None]:
        """Prefer the kernels; `poison`: memory that is allocated and not initialised is full of NaN."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        filled = torch.utils.deterministic.fill_uninitialized_memory
        with use_backend("fused"), warnings.catch_warnings():
            # cuBLAS asks for a setting of the environment before it is deterministic: of no interest here.
            warnings.filterwarnings("ignore", message=".*[Dd]eterministic.*")
            try:
                if poison:
                    torch.use_deterministic_algorithms(True, warn_only=True)
                    torch.utils.deterministic.fill_uninitialized_memory = True
                yield
            finally:
                torch.use_deterministic_algorithms(before[0], warn_only=before[1])
                torch.utils.deterministic.fill_uninitialized_memory = filled


class _OnGPU:
    """As much of a tensor as a backend looks at when it decides, as if it were on a GPU."""

    def __init__(self, tensor: torch.Tensor):
        self.device = torch.device("cuda", 0)
        self.dtype, self.shape, self.requires_grad = tensor.dtype, tensor.shape, tensor.requires_grad
        self.numel = tensor.numel


def _refuses(operation, *arguments, **settings):
    """What the backend refuses on a GPU, asked with CPU tensors."""
    arguments = [_OnGPU(one) if isinstance(one, torch.Tensor) else one for one in arguments]
    return fused.refuses(operation, *arguments, **settings)


@pytest.fixture(params=[*(["host"] if shutil.which(host.COMPILER) else []), *(["gpu"] if HAS_GPU else [])])
def kernels(request, monkeypatch) -> Kernels:
    """The same tests with the real launcher on a GPU, and with the kernels' source built for the host."""
    if request.param == "gpu":
        return _gpu(monkeypatch)
    if shutil.which(host.COMPILER) is None:
        pytest.skip("no C++ compiler")
    return _host(monkeypatch)


@pytest.fixture
def gpu(monkeypatch) -> Kernels:
    if not HAS_GPU:
        pytest.skip("no GPU")
    return _gpu(monkeypatch)


@pytest.fixture
def planned(monkeypatch) -> Kernels:
    """Kernels that are planned and recorded on CPU tensors, and not run: results are not initialised."""
    kernels = Kernels("cpu")
    monkeypatch.setattr(launching, "launch", lambda plan, values, device: kernels.launched.append(plan))
    _accept_cpu_tensors(monkeypatch, kernels)
    return kernels


@pytest.fixture
def as_on_gpu(monkeypatch) -> None:
    """The backend decides about CPU tensors as about those of a GPU; it cannot run."""
    _accept_cpu_tensors(monkeypatch, Kernels("cpu"))


def _gpu(monkeypatch) -> Kernels:
    torch.set_float32_matmul_precision("highest")  # PyTorch's default
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    kernels = Kernels("cuda")
    really_launch = launching.launch

    def launch(plan, values, device):
        kernels.launched.append(plan)
        really_launch(plan, values, device)

    monkeypatch.setattr(launching, "launch", launch)
    return kernels


def _host(monkeypatch) -> Kernels:
    kernels = Kernels("cpu")

    def launch(plan, values, device):
        kernels.launched.append(plan)
        kernel = plan.kernel
        how = plan.grid, plan.threads, plan.shared_bytes
        host.launch(kernel.source, kernel.entry, dict(kernel.constants), *how, values, order=kernels.order)

    monkeypatch.setattr(launching, "launch", launch)
    _accept_cpu_tensors(monkeypatch, kernels)
    return kernels


def _accept_cpu_tensors(monkeypatch, kernels: Kernels) -> None:
    monkeypatch.setattr(launching, "machine", lambda device: kernels.machine)
    monkeypatch.setattr(available, "reason_against", lambda index: None)
    monkeypatch.setattr(available, "runs_on_device", lambda x: True)
    monkeypatch.setitem(BACKENDS, "fused", replace(fused.BACKEND, refuses=_refuses))
