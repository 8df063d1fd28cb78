"""One program in several processes at once, their output as one."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import IO


def run_processes(count: int, module: str, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `python -m module` several times with the same arguments, and wait for all.

    A first Ctrl-C or SIGTERM is passed on to them, to save and stop; a second one ends them.

    Args:
        count: How many.
        module: The program.
        arguments: Of each.
        say: Called with each line that one of them prints, behind its number.

    Returns:
        The largest exit code.
    """
    start = partial(
        subprocess.Popen[str],
        [sys.executable, "-u", "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal sends Ctrl-C to all of its session, and each is to get it once
    )
    running = [start() for _ in range(count)]
    turn = threading.Lock()

    def pass_on(number: int, frame: FrameType | None) -> None:
        for process in running:
            process.send_signal(number)

    def read(number: int, output: IO[str]) -> None:
        for line in output:
            with turn:
                say(f"[{number}] {line.rstrip()}")

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        readers = [threading.Thread(target=read, args=(n, process.stdout)) for n, process in enumerate(running, 1)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [process.wait() for process in running]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for place, code in enumerate(codes, 1):
        if code < 0:
            say(f"[{place}] ended by {signal.Signals(-code).name}")
    return max(code if code >= 0 else 128 - code for code in codes)
