"""Run the benchmarks that the machine at hand can run: every side of a row in one process, and their ratio.

python benchmarks/run.py                    all cases
python benchmarks/run.py module --batch 64  one case, another batch
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from cases import CASES, Setting
from rich.console import Console
from rich.table import Table

from gsanet.bench import DTYPES, environment


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if cuda else "float32")
    parser.add_argument("--batch", type=int, default=256 if cuda else 2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each side of a row")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: the cases are {', '.join(CASES)}")

    console = Console()
    facts = environment(arguments.device)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), f"{arguments.dtype}", highlight=False)
    setting = Setting(arguments.device, DTYPES[arguments.dtype], arguments.batch, arguments.seconds)
    rows = []
    for name in arguments.cases or CASES:
        table = Table(title=f"{name}: {(CASES[name].__doc__ or '').splitlines()[0]}", title_justify="left")
        table.add_column("What")
        table.add_column("Measured (ratio to the first)")
        for row in CASES[name](setting):
            rows.append({"case": name, **asdict(row), "ratios": row.ratios})
            cells = [f"{side} {value:.4g} {row.unit} ({row.ratios[side]:.2f})" for side, value in row.sides.items()]
            table.add_row(row.what, "\n".join(cells))
        console.print(table)
    if arguments.json:
        result = {"environment": facts, "dtype": arguments.dtype, "batch": arguments.batch, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written: {arguments.json}")


if __name__ == "__main__":
    main()
