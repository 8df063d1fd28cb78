"""Run the benchmarks that the machine at hand can run: every side of a row in one process, and their ratio.

python benchmarks/run.py                               all cases
python benchmarks/run.py training memory --quick       some of them, with fewer repetitions
python benchmarks/run.py --json --picture speed.png    also write results/benchmarks/speed-<device>.json, and draw it
python benchmarks/run.py --processes 12                compile all networks first, twelve at a time

On a GPU: bfloat16, batch 256, compiled. On a CPU: float32, batch 2, as it is. Each row is printed and written as soon
as it is measured; a side that fails is reported, and the rest goes on.
"""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import measure
import torch
from measure import forget
from registry import Case, Setting, SkippedError, load_cases
from report import Report, default_file, losses, markdown, rich_table, row_line, tables
from rich.console import Console

from gsanet.bench import DTYPES, environment, one_line

GOALS = {"device": "H200", "batch": 256}  # where and at what the goals are set
DEFAULT = Path("default")
UNCOMPILED = ("memory", "start-up", "ceilings")  # they have nothing to compile that others have not


def main(arguments: Sequence[str] | None = None) -> None:
    cuda = torch.cuda.is_available()
    cases = load_cases()
    names = "\n".join(f"  {case.name:16} {case.summary}" for case in cases.values())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"cases:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all of those below")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--batch", type=int, help="default: 256 on a GPU, else 2")
    parser.add_argument("--compile", action="store_true", help="also compiled on a CPU, on all sides")
    parser.add_argument("--autotune", action="store_true", help="also try max-autotune, on all sides")
    parser.add_argument("--graphs", action="store_true", help="also try whole steps as CUDA graphs, on all sides")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="compile first, in so many processes")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # one of these
    parser.add_argument("--json", type=Path, nargs="?", const=DEFAULT, metavar="FILE", help="write the rows here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables here")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the rows here")
    parser.add_argument("--commit", help="what is measured, where there is no checkout that says so")
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.cases) - set(cases)):
        parser.error(f"unknown case {', '.join(unknown)}: the cases are {', '.join(cases)}")
    if chosen.processes < 0:
        parser.error(f"--processes must be 0 or more, got {chosen.processes}")

    gpu = chosen.device == "cuda"
    facts = environment(chosen.device) | ({"commit": chosen.commit} if chosen.commit else {})
    batch = chosen.batch or (256 if gpu else 2)
    dtype = DTYPES[chosen.dtype or ("bfloat16" if gpu else "float32")]
    setting = Setting(
        device=chosen.device,
        dtype=dtype,
        batch=batch,
        seconds=0.3 if chosen.quick else 1.0,
        compiled=gpu or chosen.compile,
        autotune=chosen.autotune,
        graphs=chosen.graphs,
        judged=GOALS["device"] in facts["device"] and batch == GOALS["batch"] and dtype != torch.float32,
    )
    # For all sides alike, and what anyone in a hurry would set.
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")

    wanted = chosen.cases or list(cases)
    if chosen.share is not None:
        measure.share = measure.Share(chosen.share, chosen.processes)
        compile_share([case for name, case in cases.items() if name in wanted and name not in UNCOMPILED], setting)
        return

    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 130)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    try:
        report = Report(facts, setting.as_json(), default_file(facts) if chosen.json is DEFAULT else chosen.json)
    except ValueError as error:
        parser.error(str(error))
    if report.dropped:
        console.print(f"{report.file} is of another environment or setting: its rows are replaced")
    if chosen.processes:
        begin = time.perf_counter()
        console.print(f"\ncompiling, {chosen.processes} processes")
        compile_in_processes(chosen.processes, sys.argv[1:] if arguments is None else list(arguments))
        console.print(f"  {time.perf_counter() - begin:.0f} s")
    run_cases(wanted, setting, report, console)
    show(report, console)
    if chosen.markdown:
        chosen.markdown.write_text(markdown(report.as_json()), encoding="utf-8")
    if chosen.picture:
        if importlib.util.find_spec("matplotlib") is None:
            console.print(f"no {chosen.picture}: drawing needs matplotlib (`benchmarks/picture.py` draws a JSON file)")
            chosen.picture = None
        else:
            from picture import draw

            draw([report.as_json()], chosen.picture)
    for file in (report.file, chosen.markdown, chosen.picture):
        if file is not None:
            console.print(f"written: {file}")


def compile_in_processes(processes: int, arguments: Sequence[str]) -> None:
    """Run this program with the same arguments several times at once, each to compile a share."""
    command = [sys.executable, __file__, *arguments, "--share"]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.DEVNULL) for n in range(processes)]
    for process in running:
        process.wait()


def compile_share(cases: Iterable[Case], setting: Setting) -> None:
    """Go through cases without measuring: `measure` compiles what is this process's."""
    for case in cases:
        try:
            for _ in case.rows(setting):
                pass
        except SkippedError:
            continue
        forget()


def run_cases(names: Sequence[str], setting: Setting, report: Report, console: Console) -> None:
    """Run the cases in the registry's order, where those that share networks are neighbours."""
    family = None
    for case in load_cases().values():
        if case.name not in names:
            continue
        if case.family != family:
            forget()
        family = case.family
        console.print(f"\n[bold]{case.name}[/bold]: {case.summary}")
        begin = time.perf_counter()
        report.begin(case.name)
        try:
            for row in case.rows(setting):
                found = row.as_json(case.name, setting.judged)
                report.add(found)
                console.print(f"  {row_line(found)}", markup=False)
        except SkippedError as reason:
            report.skip(case.name, str(reason))
            console.print(f"  skipped: {reason}", markup=False)
        except Exception as error:  # whatever is wrong with one case, the others are run
            report.skip(case.name, f"failed: {one_line(error)}")
            console.print(f"  failed: {one_line(error)}", markup=False)
        console.print(f"  {time.perf_counter() - begin:.0f} s")
    forget()


def show(report: Report, console: Console) -> None:
    """The tables of all rows, what was lost and what was not run."""
    content = report.as_json()
    for cells in tables(content["rows"]):
        console.print()
        console.print(rich_table(cells), soft_wrap=False)
    if lost := losses(content["rows"]):
        console.print("\nWhere another side is better:")
        for line in lost:
            console.print(f"  {line}", markup=False)
    for case, reason in content["skipped"].items():
        console.print(f"not run, {case}: {reason}", markup=False)


if __name__ == "__main__":
    main()
