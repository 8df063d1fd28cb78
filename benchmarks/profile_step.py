"""Where the time of a whole training step goes, kernel by kernel: in the order of launch, by kernel and by kind.

python benchmarks/profile_step.py gsa_resnet50 --against resnet50 --graphs
python benchmarks/profile_step.py gsa_resnet50 --set groups=3,4 --batch 128 --json profile.json

Networks are this package's, by name, and torchvision's; --set is for the first. The step is that of the case `training`
of run.py: compiled, in bfloat16 and with a batch of 256 on a GPU; on a CPU as it is, in float32 and with a batch of 2,
and operators stand for kernels. Several steps are profiled, and the one with the median sum is shown; the wall time is
measured without the profiler. Kernels of two streams may run at once: then their sum can be more than it. Launches are
the usual ones: one that is launched early would be shown with its wait for the kernel before it.
"""

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

# The profiler's own log has a line for each time it starts and stops. Read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torchvision
import yaml
from measure import Run, forget, measure
from networks import training_modes
from registry import Setting
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import gsanet
from gsanet.bench import DTYPES, environment
from gsanet.devices import check_device
from gsanet.functional.fused.compiler import KERNELS
from gsanet.functional.fused.dependent import dependent_launches
from gsanet.models.registry import as_typed
from gsanet.train.recipe import parse_overrides
from gsanet.words import suggest

OURS = "our kernels"
OTHERS = "others of PyTorch"
# The first that is found in a name counts: what Triton fuses behind a convolution has that in its name too. A 1x1
# convolution that cuDNN runs as a matrix product is one here.
KINDS = {
    "optimizer": r"multi_tensor_apply|^Optimizer\.",
    OURS: r"gsanet|^_\w*Attention",
    "Triton pointwise": r"^triton_(poi|for)",
    "Triton reductions": r"^triton_(red|per|mix)",
    "copies": r"^Mem(cpy|set)|[cC]opy|[cC]lone|contiguous|nchwToNhwc|nhwcToNchw|convertTensor|AddPadding|^aten::to$",
    "convolutions": r"[cC]onv|fprop|dgrad|wgrad",
    "matrix products": r"gemm|nvjet|cutlass|xmma|splitK|^triton_tem|[mM]m(Backward|$)|^aten::(linear|matmul|einsum)$",
}
AUTOGRAD = "autograd::engine::evaluate_function: "
WIDTH = 100  # of a kernel's name; cuDNN's have several hundred letters


@dataclass(frozen=True)
class Kernel:
    """One launch, or on a CPU one operator with all that it calls."""

    name: str
    kind: str
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """One training step of a network.

    Attributes:
        network: Its name and options.
        mode: `eager`, `compiled`, or either as a CUDA graph.
        wall: Milliseconds of a step without the profiler.
        kernels: In the order of launch.
    """

    network: str
    mode: str
    wall: float
    kernels: list[Kernel]

    @property
    def total(self) -> float:
        """Milliseconds of all kernels."""
        return sum(kernel.microseconds for kernel in self.kernels) / 1e3

    def sums(self, key: Callable[[Kernel], str]) -> dict[str, tuple[int, float]]:
        """How many kernels there are of each key, and their milliseconds; the longest first."""
        found: dict[str, list[float]] = defaultdict(list)
        for kernel in self.kernels:
            found[key(kernel)].append(kernel.microseconds / 1e3)
        longest_first = sorted(found.items(), key=lambda item: sum(item[1]), reverse=True)
        return {name: (len(times), sum(times)) for name, times in longest_first}

    def as_json(self) -> dict[str, Any]:
        """All of it, times in the units of their names."""
        return {
            "network": self.network,
            "mode": self.mode,
            "wall_ms": self.wall,
            "kernels_ms": self.total,
            "kinds_ms": {kind: time for kind, (_, time) in self.sums(lambda kernel: kernel.kind).items()},
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }


def main(arguments: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", help="a name, as `gsanet models` or torchvision has it")
    parser.add_argument("--against", metavar="NETWORK", help="profile this one too, and set the kinds side by side")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the first network"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--batch", type=int, help="default: 256 on a GPU, else 2")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--graphs", action="store_true", help="profile replays of the step as a CUDA graph")
    parser.add_argument("--steps", type=int, default=5, help="how many are profiled")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all kernels here")
    chosen = parser.parse_args(arguments)
    gpu = chosen.device == "cuda"
    batch = (256 if gpu else 2) if chosen.batch is None else chosen.batch
    for name, value in {"--batch": batch, "--img-size": chosen.img_size, "--steps": chosen.steps}.items():
        if value < 1:
            parser.error(f"{name} must be 1 or more, got {value}")
    if chosen.graphs and not gpu:
        parser.error("--graphs needs a GPU")
    setting = Setting(
        device=chosen.device,
        dtype=DTYPES[chosen.dtype or ("bfloat16" if gpu else "float32")],
        batch=batch,
        compiled=gpu,
        graphs=chosen.graphs,
        img_size=chosen.img_size,
    )
    try:
        wanted = [(chosen.network, parse_options(chosen.set))]
        wanted += [(chosen.against, {})] if chosen.against else []
        check_device(chosen.device)
        for name, options in wanted:
            check_network(name, chosen.img_size, options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if chosen.json and not chosen.json.parent.is_dir():
        parser.error(f"there is no folder {chosen.json.parent} to write {chosen.json.name} into")
    # As run.py has it.
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")

    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    facts = environment(chosen.device)
    profiles = []
    for name, options in wanted:
        with dependent_launches(False):
            say = partial(errors.print, markup=False)
            profiles.append(profile_network(name, options, setting, chosen.steps, say))
        forget()
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 150)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for found in profiles:
        for table in (order_table(found), name_table(found), kind_table(found)):
            console.print()
            console.print(table, soft_wrap=False)
        console.print(
            f"{found.network}, {found.mode}: {len(found.kernels)} {_things(setting)}, {found.total:.2f} ms, "
            f"{found.total / found.wall:.1%} of the wall time of {found.wall:.2f} ms"
        )
    if chosen.against:
        console.print()
        console.print(comparison(*profiles), soft_wrap=False)
    if chosen.json:
        content = {
            "environment": facts,
            "setting": setting.as_json(),
            "profiles": [each.as_json() for each in profiles],
        }
        chosen.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        console.print(f"written: {chosen.json}")


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """As `gsanet export --set` has them; 3,4 is a list as [3,4] is."""
    return {
        key: yaml.safe_load(f"[{value}]") if isinstance(value, str) and "," in value else value
        for key, value in parse_overrides(pairs).items()
    }


def check_network(name: str, img_size: int, options: Mapping[str, Any]) -> None:
    """Refuse a name that neither this package nor torchvision knows, and options that the network does not take."""
    names = [*gsanet.list_models(), *torchvision.models.list_models(module=torchvision.models)]
    if name not in names:
        raise ValueError(f"unknown network {name!r}: {suggest(name, names)}")
    with torch.device("meta"):
        create(name, img_size, options)


def create(name: str, img_size: int, options: Mapping[str, Any]) -> nn.Module:
    """A network of this package, or torchvision's."""
    if name in gsanet.list_models():
        return gsanet.create_model(name, img_size=img_size, **options)
    return torchvision.models.get_model(name, **options)


def profile_network(
    name: str, options: Mapping[str, Any], setting: Setting, steps: int, say: Callable[[str], object]
) -> Profile:
    """Make a network's training step, time it and profile it.

    Args:
        name: Of the network.
        options: Of the network.
        setting: Of the step.
        steps: How many are profiled.
        say: Called with what is being done, as it may take minutes.
    """
    typed = as_typed(name, options)
    with _profiler(setting):  # once before a CUDA graph is captured, as torch.profiler itself does for them
        pass
    say(f"{typed}: {'compiling, ' if setting.compiled else ''}first steps")
    modes = training_modes(partial(create, name, setting.img_size, options), setting, setting.batch, setting.img_size)
    mode, step = list(modes.items())[-1]  # as a CUDA graph, if asked for
    for _ in range(3):
        step()
    say(f"{typed}: wall time")
    wall = measure({typed: lambda: {mode: step}}, setting, repeats=3).times[typed]
    say(f"{typed}: profiling {steps} steps")
    found = [record(step, setting) for _ in range(steps + 1)][1:]  # in the first the profiler is slow
    found.sort(key=lambda kernels: sum(kernel.microseconds for kernel in kernels))
    return Profile(typed, mode, wall, found[len(found) // 2])


def record(step: Run, setting: Setting) -> list[Kernel]:
    """The kernels of one step, in the order in which they began; on a CPU, the operators that none other called."""
    with _profiler(setting) as profiler:
        step()
        if setting.cuda:
            torch.cuda.synchronize()
    return kernels_of(profiler.events(), setting)


def _profiler(setting: Setting) -> profile:
    return profile(activities=[ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU])


def kernels_of(events: Iterable[Any], setting: Setting) -> list[Kernel]:
    """The same, of what the profiler saw."""
    if setting.cuda:
        # The ranges that code gives names to, such as an optimizer's step, are shown on the GPU as well.
        chosen = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    else:
        chosen = [event for event in events if event.cpu_parent is None]
    chosen.sort(key=lambda event: event.time_range.start)
    names = [event.name.removeprefix(AUTOGRAD) for event in chosen]
    return [
        Kernel(name, kind_of(name), event.time_range.elapsed_us()) for name, event in zip(names, chosen, strict=True)
    ]


def kind_of(name: str) -> str:
    """What a kernel or an operator is for, by its name."""
    if name in entry_points():
        return OURS
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), OTHERS)


@cache
def entry_points() -> frozenset[str]:
    """The names of this package's kernels."""
    sources = [file.read_text() for file in KERNELS.glob("*.cu")]
    return frozenset(name for source in sources for name in re.findall(r"^KERNEL\(.*?\)\s+(\w+)\(", source, re.M))


def short(name: str) -> str:
    """A kernel's name, without what says little and cut to a line."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)
    return name if len(name) <= WIDTH else f"{name[: WIDTH - 1]}…"


def order_table(found: Profile) -> Table:
    """All kernels, in the order of launch; `until` is their sum so far."""
    table = _table(f"{found.network}: in the order of launch", "kernel", "kind", "µs", "until, ms")
    until = 0.0
    for kernel in found.kernels:
        until += kernel.microseconds / 1e3
        table.add_row(short(kernel.name), kernel.kind, f"{kernel.microseconds:.1f}", f"{until:.2f}")
    return table


def name_table(found: Profile) -> Table:
    """Summed by name."""
    kinds = {kernel.name: kernel.kind for kernel in found.kernels}
    table = _table(f"{found.network}: by kernel", "kernel", "kind", "launches", "ms", "share")
    for name, (count, time) in found.sums(lambda kernel: kernel.name).items():
        table.add_row(short(name), kinds[name], str(count), f"{time:.3f}", f"{time / found.total:.1%}")
    return table


def kind_table(found: Profile) -> Table:
    """Summed by kind."""
    table = _table(f"{found.network}: by kind", "kind", "launches", "ms", "share")
    for kind, (count, time) in found.sums(lambda kernel: kernel.kind).items():
        table.add_row(kind, str(count), f"{time:.3f}", f"{time / found.total:.1%}")
    return table


def comparison(ours: Profile, theirs: Profile) -> Table:
    """The kinds of two networks, side by side."""
    sums = [each.sums(lambda kernel: kernel.kind) for each in (ours, theirs)]
    table = _table("Side by side, ms", "kind", ours.network, theirs.network, "difference")
    kinds = dict.fromkeys([*sums[0], *sums[1]])
    lines = {kind: [each[kind][1] if kind in each else 0.0 for each in sums] for kind in kinds}
    lines |= {"all": [ours.total, theirs.total], "wall time": [ours.wall, theirs.wall]}
    for what, (one, other) in lines.items():
        table.add_row(what, f"{one:.3f}", f"{other:.3f}", f"{one - other:+.3f}")
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("kernel", "kind") else "right", overflow="fold")
    return table


def _things(setting: Setting) -> str:
    return "kernels" if setting.cuda else "operators"


if __name__ == "__main__":
    main()
