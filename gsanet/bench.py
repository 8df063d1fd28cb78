"""Measuring networks side by side: training, inference, latency and memory at one setting, in one run.

The networks take turns, so that a change in the machine's load meets all of them alike. A training step is forward,
cross-entropy, backward and a step of SGD with momentum.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gsanet
from gsanet.devices import check_device
from gsanet.models.registry import as_typed
from gsanet.provenance import package_commit

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class BenchSetting:
    """What all networks of a run are measured at.

    Args:
        img_size: Height and width of the images.
        batch: Images in a batch, of training and inference; latency is of one image.
        device: `cpu` or `cuda`.
        dtype: A name of `DTYPES`; other than float32 is autocast.
        seconds: How long each network is timed, for each of training, inference and latency.
    """

    img_size: tuple[int, int] = (224, 224)
    batch: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        check_device(self.device)
        if self.batch < 1 or not 0 < self.seconds < math.inf:  # nan is neither
            raise ValueError(f"batch and seconds must be positive, got {self.batch} and {self.seconds}")


@dataclass
class BenchRow:
    """One network; what could not be measured is None, and `errors` says why.

    Memory is in bytes. On a GPU it is the most that PyTorch held during a step, weights, gradients and optimizer
    included. On a CPU, where nothing counts that, `train_memory` is what the forward pass keeps for the backward pass,
    and `inference_memory` is None.
    """

    model: str
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    params: int | None = None
    flops: int | None = None
    train_images_per_second: float | None = None
    inference_images_per_second: float | None = None
    latency_ms: float | None = None
    train_memory: int | None = None
    inference_memory: int | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The network's name and options, as one types them."""
        return as_typed(self.model, self.model_kwargs)


def bench(
    networks: Sequence[tuple[str, dict[str, Any]]],
    setting: BenchSetting,
    progress: Callable[[str, float], None] = lambda what, part: None,
) -> list[BenchRow]:
    """Measure networks, in turns.

    Args:
        networks: Names, as `gsanet.list_models` gives them, and options of each.
        setting: What they are measured at.
        progress: Called with what is being done and how far that is, from 0 to 1.
    """
    rows = {row.name: row for row in (BenchRow(model, options) for model, options in networks)}
    steps: dict[str, dict[str, Callable[[], object]]] = {"training": {}, "inference": {}, "latency": {}}
    for number, (name, row) in enumerate(rows.items()):
        progress(f"making {name}", number / len(rows))
        try:
            model = gsanet.create_model(row.model, img_size=setting.img_size, **row.model_kwargs)
            row.params, row.flops = gsanet.count_parameters(model), gsanet.count_flops(model, setting.img_size)
            model.to(setting.device).to(memory_format=torch.channels_last)
        except Exception as error:  # whatever is wrong with one network, the others are measured
            row.errors["making"] = one_line(error)
            continue
        steps["training"][name] = TrainingStep(model, _images(model, setting, setting.batch), DTYPES[setting.dtype])
        for what, batch in {"inference": setting.batch, "latency": 1}.items():
            images = _images(model, setting, batch)
            steps[what][name] = partial(inference, model, images, DTYPES[setting.dtype])

    times: dict[str, dict[str, float]] = {}
    for what, sides in steps.items():

        def fail(name: str, error: Exception, what: str = what) -> None:
            rows[name].errors[what] = one_line(error)

        times[what] = milliseconds(sides, setting.device, setting.seconds, fail, partial(progress, f"timing {what}"))
    for name, row in rows.items():
        progress("weighing", list(rows).index(name) / len(rows))
        if (took := times["training"].get(name)) is not None:
            row.train_images_per_second = 1e3 * setting.batch / took
            row.train_memory = train_memory(steps["training"][name], setting.device)
        if (took := times["inference"].get(name)) is not None:
            row.inference_images_per_second = 1e3 * setting.batch / took
            if setting.device == "cuda":
                step: Any = steps["inference"][name]
                row.inference_memory = _weight(step.args[0]) + round(peak_mebibytes(step) * 2**20)
        row.latency_ms = times["latency"].get(name)
    progress("done", 1.0)
    return list(rows.values())


class TrainingStep:
    """One step of training on one batch, again and again."""

    def __init__(self, model: nn.Module, images: Tensor, dtype: torch.dtype):
        self.model, self.images, self.dtype = model, images, dtype
        self.labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
        # So small that the weights stay where they are, however often the step is run.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9)

    def forward(self) -> Tensor:
        """The loss."""
        if not self.model.training:  # going through all modules takes a GPU's time as well
            self.model.train()
        with torch.autocast(self.images.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return F.cross_entropy(self.model(self.images), self.labels)

    def __call__(self) -> None:
        """Forward, backward, step; the gradients are let go."""
        try:
            self.forward().backward()
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)


@torch.inference_mode()
def inference(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    """The logits of a batch."""
    if model.training:
        model.eval()
    with torch.autocast(images.device.type, dtype=dtype, enabled=dtype != torch.float32):
        return model(images)


def milliseconds(
    sides: Mapping[str, Callable[[], object]],
    device: str,
    seconds: float,
    fail: Callable[[str, Exception], None] | None = None,
    progress: Callable[[float], None] = lambda part: None,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The median time of each side.

    The sides take turns, so that a change in the machine's load meets all of them alike; each is run once before.

    Args:
        sides: What to run, by name.
        device: `cpu` or `cuda`.
        seconds: For each side. Each is timed three times at least.
        fail: Called with the name of a side and its error; the others go on without it. Default: the error is raised.
        progress: Called with how much of all this is done, from 0 to 1.
        prepare: Called before each turn, outside of what is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}

    def turn(name: str) -> float | None:
        try:
            return _once(sides[name], device, prepare)
        except Exception as error:
            if fail is None:
                raise
            del times[name]
            if device == "cuda":
                torch.cuda.empty_cache()
            fail(name, error)
            return None

    for number, name in enumerate(sides):
        progress(0.2 * number / len(sides))
        turn(name)
    begin, rounds = time.perf_counter(), 0
    while times and ((passed := time.perf_counter() - begin) < seconds * len(times) or rounds < 3):
        for number, name in enumerate(list(times)):
            if (took := turn(name)) is not None:
                times[name].append(took)
            progress(0.2 + 0.8 * min(1.0, passed / (seconds * len(sides)), (rounds + number / len(sides)) / 3))
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items() if values}


def _once(run: Callable[[], object], device: str, prepare: Callable[[], object]) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        prepare()
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    prepare()
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def peak_mebibytes(run: Callable[[], object]) -> float:
    """The most memory that PyTorch held on the GPU during a run, over what it held before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def saved_bytes(forward: Callable[[], object]) -> int:
    """What a forward pass keeps for the backward pass, each piece of memory counted once."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values())


def train_memory(step: Any, device: str) -> int:
    """Bytes of a `TrainingStep`; what is counted, `BenchRow` says."""
    if device == "cuda":
        state = sum(
            value.numel() * value.element_size()
            for states in step.optimizer.state.values()
            for value in states.values()
            if isinstance(value, Tensor)
        )
        return _weight(step.model) + state + round(peak_mebibytes(step) * 2**20)
    return saved_bytes(step.forward)


def _weight(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def _images(model: nn.Module, setting: BenchSetting, batch: int) -> Tensor:
    channels: int = getattr(model, "in_chans", 3)
    images = torch.randn(batch, channels, *setting.img_size, device=setting.device)
    return images.to(memory_format=torch.channels_last)


def one_line(error: Exception) -> str:
    """What an error says, without the pages that compilers add."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # torch.compile says which backend it was in the first line, and what went wrong in the next.
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def environment(device: str) -> dict[str, str]:
    """What the measurements were made with."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": name,
        "gsanet": gsanet.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "commit": (package_commit() or "unknown")[:7],
    }
