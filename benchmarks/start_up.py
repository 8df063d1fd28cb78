"""From the first call of one module to full speed, in a new process with nothing cached.

This file is both the case and the process that it starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from registry import Row, Setting, Target, case

import gsanet
from gsanet.bench import DTYPES

SIZE, CHANNELS = 56, 64
CACHES = ("GSANET_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
SLACK = 1.2  # a call within this of the final speed is at full speed
CALLS = 20


@case("start-up", "start-up")
def start_up(setting: Setting) -> Iterator[Row]:
    """Time from the first call of one module to full speed: forward and backward, new process, empty caches."""
    dtype = str(setting.dtype).removeprefix("torch.")
    numbers = map(str, (setting.batch, SIZE, CHANNELS, setting.seconds))
    command = [sys.executable, __file__, setting.device, dtype, *numbers]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name.lower())) for name in CACHES}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | caches, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process failed"])[-1])
    seconds = json.loads(done.stdout.splitlines()[-1])
    what = f"First call to full speed, {SIZE}x{SIZE}x{CHANNELS}, batch {setting.batch}"
    yield Row(what, "s", {"gsanet": seconds}, "gsanet", "lower", Target(10.0, 5.0, of="value"))


def time_calls(run: Callable[[], object], seconds: float) -> list[tuple[float, float]]:
    """When each call began and ended, in seconds since the first began."""
    calls: list[tuple[float, float]] = []
    first = time.perf_counter()
    while len(calls) < CALLS or calls[-1][1] - calls[0][1] < seconds:
        begin = time.perf_counter() - first
        run()
        calls.append((begin, time.perf_counter() - first))
    return calls


def full_speed(calls: list[tuple[float, float]]) -> float:
    """When the first call ended that ran at the final speed, that of the last calls."""
    final = statistics.median(end - begin for begin, end in calls[-CALLS // 2 :])
    return next(end for begin, end in calls if end - begin <= SLACK * final)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("dtype", choices=DTYPES)
    for name in ("batch", "size", "channels"):
        parser.add_argument(name, type=int)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    batch, size, channels = arguments.batch, arguments.size, arguments.channels
    module = gsanet.GlobalSelfAttention(channels, feat_size=size).to(device)
    x = torch.randn(batch, channels, size, size, device=device, dtype=dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn_like(x)

    def run() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            out = module(x)
        torch.autograd.grad(out, [x, *module.parameters()], gradient.to(out.dtype))
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":
        torch.cuda.synchronize()  # the GPU is at hand; from here on it is the operation's time
    print(full_speed(time_calls(run, arguments.seconds)))


if __name__ == "__main__":
    main()
