"""Images a second of each data path, alone and in front of a network, and how long the device waits for data.

python benchmarks/data_path.py                                        what the machine at hand can do
python benchmarks/data_path.py --device cuda --img-size 64 --batch-size 512

The images are made up: small ones of the input's size for the path that keeps them on the device, photograph-sized JPEG
files for the path that decodes them each time. A device waits from the end of one training step to the beginning of the
next; what it does in between for the data itself, such as augmentation, counts as waiting.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

import gsanet
from gsanet.bench import environment
from gsanet.train.data import DataSettings, TrainLoader, open_data
from gsanet.train.data.batches import IndexedTrainLoader
from gsanet.train.data.damage import Damage
from gsanet.train.data.memory import MemoryStore
from gsanet.train.data.settings import Plan
from gsanet.train.data.sources import ArraySource

SMALL_IMAGES = 20_000
PHOTOGRAPHS = 8192
DISTINCT_PHOTOGRAPHS = 64
PHOTOGRAPH_SIZE = (375, 500)
CLASSES = 10
POLICY: dict[str, Any] = {"policy": "trivial"}
ERASE: dict[str, Any] = {"erase": 0.25}
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("in memory", {"augment": "crop"}),
    ("in memory", {"augment": "crop", **POLICY}),
    ("in memory", {"augment": "crop", **ERASE}),
    ("in memory", {"augment": "crop", **POLICY, **ERASE}),
    ("in memory", {"augment": "resized_crop"}),
    ("decoded", {"augment": "resized_crop"}),
    ("decoded", {"augment": "resized_crop", **POLICY, **ERASE}),
]


@dataclass(frozen=True)
class Row:
    """One data path with one augmentation."""

    path: str
    augment: str
    alone: float  # images a second
    with_network: float  # images a second
    waiting: float  # share of the time, with the network


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--img-size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512 if cuda else 32)
    parser.add_argument("--model", default="gsa_resnet38")
    parser.add_argument("--workers", type=int, help="decoding processes; default: as in training")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()

    console = Console()
    facts = environment(arguments.device)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    size = (arguments.img_size, arguments.img_size)
    step = training_step(arguments.model, size, arguments.device)
    rows = []
    title = f"{arguments.model}, {size[0]}x{size[1]}, batch {arguments.batch_size}"
    table = Table("Path", "Augmentation", title=title, title_justify="left")
    for heading in ("Alone (img/s)", "With network (img/s)", "Waits for data"):
        table.add_column(heading, justify="right")
    chosen = {} if arguments.workers is None else {"workers": arguments.workers}
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder))
        for path, augmentation in PATHS:
            augment = ", ".join(value if isinstance(value, str) else name for name, value in augmentation.items())
            settings = DataSettings(img_size=size, **augmentation, **chosen)
            plan = Plan(settings, arguments.batch_size, 0, 0, 1, torch.device(arguments.device))
            loader = in_memory(plan) if path == "in memory" else decoded(folder, plan)
            batches = endless(loader)
            alone, _ = run(batches, None, arguments.device, arguments.seconds)
            with_network, waiting = run(batches, step, arguments.device, arguments.seconds)
            rows.append(Row(path, augment, alone, with_network, waiting))
            table.add_row(path, augment, f"{alone:,.0f}", f"{with_network:,.0f}", f"{waiting:.1%}")
    console.print(table)
    if arguments.json:
        setting = {"model": arguments.model, "img_size": size[0], "batch_size": arguments.batch_size}
        result = {"environment": facts, **setting, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written: {arguments.json}")


def run(
    batches: Iterator[tuple[Tensor, Tensor]], step: Callable[[Tensor, Tensor], None] | None, device: str, seconds: float
) -> tuple[float, float]:
    """Images a second, and the share of the time in which no step was running."""
    for _ in range(3):
        images, labels = next(batches)
        if step:
            step(images, labels)
    clock = Clock(device)
    begin = end = clock.now()
    count, waits = 0, []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        images, labels = next(batches)
        waits.append((end, clock.now()))
        if step:
            step(images, labels)
        end = clock.now()
        count += len(labels)
    used = clock.between(begin, end)
    return count / used, sum(clock.between(*wait) for wait in waits) / used


class Clock:
    """Points in the device's time: on a GPU, when it has done all that was asked of it before."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def now(self) -> Any:
        """This point."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds; waits for the second point to come."""
        if not self.cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def endless(loader: TrainLoader) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in count():
        yield from loader.batches(epoch)


def training_step(name: str, size: tuple[int, int], device: str) -> Callable[[Tensor, Tensor], None]:
    """Forward, backward and update, in bfloat16 on a GPU."""
    model = gsanet.create_model(name, img_size=size, num_classes=CLASSES).to(device).train()
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def in_memory(plan: Plan) -> TrainLoader:
    """Random pixels on the device."""
    rng = np.random.default_rng(0)
    size = plan.settings.img_size
    images = rng.integers(0, 256, (SMALL_IMAGES, *size, 3), dtype=np.uint8)
    source = ArraySource("image", images, rng.integers(0, CLASSES, SMALL_IMAGES))
    store = MemoryStore(source, plan, Damage("training", SMALL_IMAGES, 0.0), train=True, size=size, resize=False)
    return IndexedTrainLoader(store, plan)


def decoded(folder: str, plan: Plan) -> TrainLoader:
    """JPEG files through worker processes."""
    return open_data(folder, plan.settings, batch_size=plan.batch_size, seed=plan.seed, device=plan.device).train


def write_photographs(folder: Path) -> None:
    """Files as large as photographs compress to; few distinct ones, under many names."""
    rng = np.random.default_rng(0)
    height, width = PHOTOGRAPH_SIZE
    originals = folder / "originals"
    originals.mkdir()
    for number in range(DISTINCT_PHOTOGRAPHS):
        coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(originals / f"{number}.jpg", quality=90)
    for split, total in (("train", PHOTOGRAPHS), ("val", CLASSES)):
        for label in range(CLASSES):
            (folder / split / str(label)).mkdir(parents=True)
        for number in range(total):
            original = originals / f"{number % DISTINCT_PHOTOGRAPHS}.jpg"
            (folder / split / str(number % CLASSES) / f"{number}.jpg").symlink_to(original)


if __name__ == "__main__":
    main()
