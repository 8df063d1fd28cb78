"""How long `gsanet explore` takes to answer: over HTTP, as a browser asks, with random weights.

python benchmarks/explorer.py [--models gsa_resnet26_tiny gsa_resnet50] [--clicks 20] [--threads 2]

`open` is a new picture: the network runs once, and every GSA module is read. `click` is a new pixel: the maps of all
modules, all heads and all branches, drawn and sent. The goal is a click in under a second on two cores.
"""

import argparse
import json
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gsanet
from gsanet.bench import environment
from gsanet.explore.server import check_installed, serve
from gsanet.predict import Classifier, Transform
from gsanet.train.data import DataSettings

GOAL = 1.0  # seconds


@dataclass(frozen=True)
class Timing:
    """Seconds until the answer was there, and the bytes of the last one."""

    opened: float
    clicks: list[float]
    answer: int


class Visitor:
    """One visitor of the page, who asks as its script does."""

    def __init__(self, address: str):
        import httpx

        self.http = httpx.Client(base_url=f"{address}/gradio_api", timeout=120)
        self.session = f"{random.random()}"
        calls = self.http.get(f"{address}/config").json()["dependencies"]
        self.calls = {call["api_name"]: call for call in calls}

    def ask(self, name: str, event: dict[str, Any] | None = None) -> tuple[float, int]:
        """Seconds until the answer was there, and its bytes."""
        call = self.calls[name]
        sent = {"data": [None] * len(call["inputs"]), "fn_index": call["id"], "session_hash": self.session}
        started = time.perf_counter()
        self.http.post("/queue/join", json=sent | {"event_data": event}).raise_for_status()
        with self.http.stream("GET", "/queue/data", params={"session_hash": self.session}) as lines:
            for line in lines.iter_lines():
                if "process_completed" in line:
                    seconds = time.perf_counter() - started
                    if not json.loads(line.removeprefix("data:"))["success"]:
                        raise RuntimeError(f"{name} failed: {line[:300]}")
                    return seconds, len(line)
        raise RuntimeError(f"{name} was not answered")


def measure(model: str, clicks: int) -> Timing:
    network: Any = gsanet.create_model(model)
    height, width = network.pretrained_cfg["input_size"][1:]
    classifier = Classifier(network.eval(), Transform(DataSettings((height, width))), (), model)
    ready: queue.Queue[str] = queue.Queue()
    threading.Thread(target=serve, args=(classifier, "127.0.0.1", 0, ready.put), daemon=True).start()
    visitor = Visitor(ready.get(timeout=120))
    visitor.ask("open_first")  # what is only done once
    opened, _ = visitor.ask("open_sample", {"sample": "flower"})  # 640x427, of which the middle is seen
    numbers = random.Random(0)
    found = [
        visitor.ask("pick_pixel", {"x": numbers.randrange(140, 500), "y": numbers.randrange(40, 380)})
        for _ in range(clicks)
    ]
    return Timing(opened, [seconds for seconds, _ in found], found[-1][1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["gsa_resnet26_tiny", "gsa_resnet50", "gsa_resnet101"]
    parser.add_argument("--models", nargs="+", default=default, metavar="NAME")
    parser.add_argument("--clicks", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    chosen = parser.parse_args(arguments)
    check_installed()
    torch.set_num_threads(chosen.threads)
    console = Console(highlight=False, soft_wrap=True)
    console.print(", ".join(f"{name} {value}" for name, value in environment("cpu").items()))
    table = Table("Network", "Open (s)", "Click (s)", "Slowest (s)", "Answer (KB)", f"< {GOAL:g} s")
    table.columns[0].no_wrap = True
    for model in chosen.models:
        found = measure(model, chosen.clicks)
        slowest = max(found.clicks)
        figures = (found.opened, statistics.median(found.clicks), slowest)
        cells = [f"{seconds:.3f}" for seconds in figures] + [f"{found.answer / 1e3:.0f}"]
        table.add_row(model, *cells, "yes" if slowest < GOAL else "no")
    console.print(table)


if __name__ == "__main__":
    main()
