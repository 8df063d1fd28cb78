"""What a person sees of a run: progress, metrics on disk, curves, and where everything is."""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from gsanet.train.checkpoint import explained, go_on, replace_file
from gsanet.train.evaluate import overflow_words
from gsanet.train.in_use import hold
from gsanet.train.step_log import StepRecord

METRICS = "metrics.jsonl"
ROW_EVERY = 50  # steps between two rows of the training loss


class Reporter:
    """Metrics as JSONL and for TensorBoard, a progress bar on a terminal, and one line an epoch.

    Args:
        out: The run directory.
        step: Where the run starts; what an earlier one wrote of later steps is taken back, as they are done again.
        total_steps: Where it ends.
        active: False for all processes but the first, which then say and write nothing.
        losses: Those of the steps since the last row of the training loss, which are no row yet. The list is kept up to
            date, for the checkpoints: so the first row after one is of all its steps.
    """

    def __init__(self, out: Path, step: int, total_steps: int, active: bool = True, losses: list[float] | None = None):
        self.out, self.active, self.total_steps = out, active, total_steps
        self._last = (step, time.perf_counter())
        self._losses = [] if losses is None else losses
        self._closing = ExitStack()
        self._bar: Any = None
        if not active:
            return
        with explained(f"metrics to {out}", go_on(out)):
            _drop_rows_after(out / METRICS, step)
            self._metrics = self._closing.enter_context((out / METRICS).open("ab", buffering=0))
            hold(self._metrics)
            self._board = _tensorboard(out, step)
        if self._board is not None:
            self._closing.callback(self._board.close)
        if sys.stdout.isatty():
            self._bar = self._closing.enter_context(_progress_bar())
            self._task = self._bar.add_task("", total=total_steps, completed=step, loss="", speed="")

    def say(self, text: str) -> None:
        """Print a line."""
        if self.active:
            if self._bar is None:
                print(text, flush=True)
            else:
                self._bar.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def step(self, record: StepRecord, batch_size: int) -> None:
        """An optimizer step is done."""
        if not self.active:
            return
        self._losses.append(record.loss)
        before, then = self._last
        now = time.perf_counter()
        speed = (record.step - before) * batch_size / (now - then)
        if self._bar is not None:
            text = {"loss": f"loss {record.loss:.3f}", "speed": f"{speed:,.0f} images/s"}
            self._bar.update(self._task, completed=record.step, **text)
        if record.step % ROW_EVERY == 0:
            mean = sum(self._losses) / len(self._losses)
            self.row("train", record.step, {"loss": mean, "lr": record.lr, "images_per_second": speed})
            self._losses.clear()
            self._last = record.step, now

    def epoch(self, step: int, total_epochs: int, values: Mapping[str, float]) -> None:
        """An epoch is done and evaluated."""
        self.row("epoch", step, values)
        overflowed = overflow_words(values["overflowed"])
        self.say(
            f"epoch {values['epoch']:.4g} of {total_epochs}: loss {values['train_loss']:.4f}, "
            f"validation loss {values['val_loss']:.4f}, top-1 {values['top1']:.2f} %, top-5 {values['top5']:.2f} %, "
            f"{values['images_per_second']:,.0f} images/s{overflowed and ', '}{overflowed}"
        )
        self._last = step, time.perf_counter()  # the evaluation is no part of the training speed

    def row(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write metrics of a step."""
        if not self.active:
            return
        with explained(f"metrics to {self.out}", go_on(self.out)):
            # JSON has no word for what is not a number.
            known = {key: value if math.isfinite(value) else None for key, value in values.items()}
            self._metrics.write(json.dumps({"kind": kind, "step": step, **known}).encode() + b"\n")
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the rows are written; a full disk was reported then
            self._closing.close()


def read_metrics(out: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind, `train` or `epoch`, of a run directory."""
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def draw_curves(runs: Mapping[str, Path], file: Path) -> str | None:
    """Draw training loss, validation loss and top-1 of runs, by name, over their epochs.

    Returns:
        Why there is no picture, or None.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no curves were drawn: matplotlib is not installed"
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, accuracy = figure.subplots(1, 2)
    highest = 0.0
    for index, (name, out) in enumerate(runs.items()):
        rows = read_metrics(out, "epoch")
        columns = {key: [row[key] for row in rows] for key in ("epoch", "train_loss", "val_loss", "top1")}
        look: dict[str, Any] = {"color": f"C{index}", "marker": "." if len(rows) < 30 else ""}
        losses.plot(columns["epoch"], columns["train_loss"], label=f"{name}, training", **look)
        losses.plot(columns["epoch"], columns["val_loss"], label=f"{name}, validation", linestyle="--", **look)
        accuracy.plot(columns["epoch"], columns["top1"], label=name, **look)
        highest = max([highest, *columns["train_loss"]])
    losses.set(xlabel="epoch", ylabel="loss")
    if losses.get_ylim()[1] > 2 * highest:  # an evaluation in which some image overflowed
        losses.set_ylim(top=2 * highest)
    accuracy.set(xlabel="epoch", ylabel="top-1 (%), validation")
    for axes in (losses, accuracy):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
    return None


def duration(seconds: float) -> str:
    """As 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _drop_rows_after(file: Path, step: int) -> None:
    """Keep the whole rows up to a step: a run that was killed may have written more, and half of one."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    replace_file(file, "".join(kept).encode())


def _tensorboard(out: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard events are written: tensorboard is not installed", flush=True)
        return None
    return SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)


def _progress_bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps  {task.fields[loss]}  {task.fields[speed]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
        transient=True,
    )
