"""`gsanet paper`: the paper's tables, and the experiments that stand for its own."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from gsanet.cli.common import AsJson, console, errors, show

paper = typer.Typer(no_args_is_help=True, help="The paper's tables, counted and measured again.")
ResultsFolder = Annotated[Path, typer.Option("--results", help="The folder of measured results.")]


@paper.command()
def structure(as_json: AsJson = False) -> None:
    """Count parameters and operations of the paper's networks, beside what the paper prints."""
    from gsanet.paper.structure import ROWS
    from gsanet.paper.structure import structure as counted

    rows = list(track(counted(), description="Counting", total=len(ROWS), console=errors, transient=True))
    show([{**asdict(row), "match": row.matches} for row in rows], _show_structure(rows), as_json, fold=True)


def _show_structure(rows: Sequence[Any]) -> Iterator[Table | str]:
    table = Table("Network", title="Parameters (M) and FLOPs (G) at 224x224, 1000 classes", title_justify="left")
    for heading in ("Params", "paper", "FLOPs", "paper"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.network}\n[dim]{row.made_by}; Table {row.table}[/]",
            f"{row.params / 1e6:.3f}",
            _mark(row.printed_params_m, row.params_match),
            f"{row.flops / 1e9:.3f}",
            _mark(row.printed_flops_g, row.flops_match),
            "[green]match[/]" if row.matches else "[yellow]no match[/]",
        )
    yield table
    for row in rows:
        if row.note:
            yield f"{row.network}: {row.note}"
    yield f"{sum(row.matches for row in rows)} of {len(rows)} match to the last printed digit."


def _mark(figure: str, matches: bool) -> str:
    return figure if matches else f"[yellow]{figure}[/]"


@paper.command()
def table1(as_json: AsJson = False) -> None:
    """What each system's attention can do, measured: the marks of Table 1 beside the paper's."""
    from gsanet.paper.printed import printed_table
    from gsanet.paper.show import show_table1
    from gsanet.paper.table1 import networks
    from gsanet.paper.table1 import table1 as measured

    total = len(networks())
    rows = list(track(measured(), description="Measuring", total=total, console=errors, transient=True))
    show(
        [{**asdict(row), "commutes_with": row.commutes_with} for row in rows],
        show_table1(printed_table(1), rows),
        as_json,
        fold=True,
    )


def _paper_table(number: int, summary: str) -> None:
    """Add the command `gsanet paper tableN`."""

    def command(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
        from gsanet.paper.compare import compare, seed_spreads
        from gsanet.paper.printed import printed_table
        from gsanet.paper.results import read_results
        from gsanet.paper.show import show_comparisons, show_table
        from gsanet.paper.tables import table_rows

        printed = printed_table(number)
        known = read_results(results)
        counted = table_rows(number, known)
        total = len(printed.rows)
        rows = list(track(counted, description="Counting", total=total, console=errors, transient=True))
        compared = compare(number, rows, seed_spreads(known))
        differences = [
            {"setting": setting, **asdict(found), "order_holds": [pair.agrees for pair in found.pairs]}
            for setting, found in compared.items()
        ]
        content = {"table": number, "caption": printed.caption, "rows": [asdict(row) for row in rows]}
        parts = chain(show_table(printed, rows), show_comparisons(compared))
        show({**content, "compared": differences}, parts, as_json, fold=True)

    paper.command(f"table{number}", help=f"{summary}: as printed, counted, and measured here.")(command)


for _number, _summary in {
    2: "GSA against axial attention",
    3: "GSA against existing approaches",
    4: "The components of GSA",
    5: "The residual groups that attend",
    6: "CNN against GSA",
}.items():
    _paper_table(_number, _summary)


@paper.command()
def figures(
    results: ResultsFolder = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder of the pictures.")] = Path("docs"),
) -> None:
    """Draw measured accuracy against parameters, FLOPs and throughput, a picture for each data set."""
    from gsanet.paper.figure import draw_results
    from gsanet.paper.results import read_results

    if not out.is_dir():
        raise ValueError(f"there is no folder {out} to draw into")
    for file in draw_results(read_results(results), out):
        console.print(f"written: {file}", soft_wrap=True, highlight=False)


@paper.command("studies")
def show_paper_studies(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """What was tried that the paper leaves open: the GSA module with one thing changed, against the module itself."""
    from gsanet.paper.open_questions import answers
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_answers

    rows = answers(read_results(results))
    show([asdict(row) for row in rows], show_answers(rows), as_json, fold=True)


@paper.command("choices")
def show_paper_choices(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """What the recipe of the tables was chosen by: two networks on training images that were held out."""
    from gsanet.paper.choices import choices
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_choices

    rows = choices(read_results(results))
    show(
        [{**asdict(row), "mean": row.mean, "difference": row.difference} for row in rows],
        show_choices(rows),
        as_json,
        fold=True,
    )


@paper.command("decay")
def show_paper_decay(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """What weight decay does: networks of the tables, with theirs and with the recipe's."""
    from gsanet.paper.decay import decayed
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_decayed

    rows = decayed(read_results(results))
    show([{**asdict(row), "gained": row.gained} for row in rows], show_decayed(rows), as_json, fold=True)


@paper.command("best")
def show_paper_best(results: ResultsFolder = Path("results"), as_json: AsJson = False) -> None:
    """The best networks on CIFAR-100, whatever the recipe: GSA against a ResNet of its depth, and the paper's."""
    from gsanet.paper.best import pairs
    from gsanet.paper.results import read_results
    from gsanet.paper.show import show_pairs

    rows = pairs(read_results(results))
    show([{**asdict(row), "difference": row.difference} for row in rows], show_pairs(rows), as_json, fold=True)


@paper.command("run")
def run_paper(
    names: Annotated[list[str] | None, typer.Argument(help="Names or patterns, such as 'cifar100-*'.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All runs of the matrix.")] = False,
    table: Annotated[int | None, typer.Option(help="The runs of a table of the paper.", min=2, max=6)] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show what is left, and run nothing.")] = False,
    data: Annotated[list[str] | None, typer.Option(help="DATASET=PATH. Default: data/DATASET.")] = None,
    work: Annotated[Path, typer.Option(help="The folder of run directories.")] = Path("runs/paper"),
    results: ResultsFolder = Path("results"),
    stop_after: Annotated[float | None, typer.Option(help="Save and stop after so many seconds.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Begin only what can be finished by then.")] = False,
    processes: Annotated[int, typer.Option(help="So many runs at a time: one compiles while others train.")] = 1,
    compile: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Use CUDA graphs.")] = False,
    commit: Annotated[str, typer.Option(help="The commit that runs. Default: the checkout's.")] = "",
) -> None:
    """Make the experiments that stand for the paper's; those with results are not made again, cut ones go on."""
    from gsanet.paper.run_matrix import run_command

    code = run_command(
        names or [],
        everything=everything,
        table=table,
        list_only=list_only,
        data=data or [],
        work=work,
        results=results,
        stop_after=stop_after,
        whole=whole,
        processes=processes,
        compile=compile,
        graphs=graphs,
        commit=commit,
        say=lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False),
    )
    if code:
        raise typer.Exit(code)


@paper.command("record")
def record_paper_run(
    run: Annotated[Path, typer.Option(help="A finished run directory of `gsanet train`.")],
    name: Annotated[str, typer.Option(help="What to call it.")],
    recipe: Annotated[str, typer.Option(help="The recipe that it was started with.")],
    dataset: Annotated[str, typer.Option(help="What it was trained on. Default: its data's last part.")] = "",
    notes: Annotated[str, typer.Option(help="For the reader.")] = "",
    commit: Annotated[str, typer.Option(help="The commit that made it. Default: what the run noted.")] = "",
    results: ResultsFolder = Path("results"),
) -> None:
    """Write the results of a run that is not in the matrix, as results/runs/NAME.json."""
    from gsanet.paper.record import record_run

    if not name or Path(name).name != name:
        raise ValueError(f"--name is the name of a file in {results / 'runs'}, without folders, got {name!r}")
    file = results / "runs" / f"{name}.json"
    found = record_run(run, file, recipe_name=recipe, commit=commit, dataset=dataset, notes=notes)
    console.print(f"written: {file}: top-1 {found.top1:.2f} % of {found.evaluated_on}", highlight=False, soft_wrap=True)
