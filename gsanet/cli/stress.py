"""`gsanet stress` and `limits`: how well networks hold up."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from gsanet.cli.common import AsJson, DeviceOption, check_writable, errors, say, show

DataOption = Annotated[str, typer.Option("--data", help="The data set, as for `gsanet train`: its held-out images.")]
NetworksArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Run directories, files of `gsanet pack`, names of networks with weights in the package. "
        "Default: the package's.",
        show_default=False,
    ),
]
ImagesOption = Annotated[
    int, typer.Option("--images", help="At most so many, chosen at random, the same for all; 0: all.", min=0)
]


def stress(
    data: DataOption,
    networks: NetworksArgument = None,
    images: ImagesOption = 2000,
    change: Annotated[
        list[str] | None, typer.Option(help="Which change, such as zoom-in-3/4; may be repeated. Default: all.")
    ] = None,
    device: DeviceOption = "",
    picture: Annotated[Path | None, typer.Option(help="Draw an image under each change, above the accuracies.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how accuracy holds up when images are zoomed, shifted, blurred, cut up and so on."""
    from gsanet.stress import choose_changes, measure

    changes = choose_changes(change or [])
    if picture is not None:
        check_writable(picture, picture=True)
    opened = _open(networks, data, images, device)
    found = []
    for _, classifier, held_out in opened:
        batches = track(held_out.val.batches(), classifier.name, len(held_out.val), console=errors, transient=True)
        found.append(measure(classifier, batches, changes))
    _say_skipped(opened)
    labels = _labels(opened)
    show(_as_json(data, opened, found), _show_stress(found, labels, data), as_json)
    if picture is not None:
        from gsanet.stress.figure import draw

        first, _ = next(iter(opened[0].held_out.val.batches()))
        draw(found, labels, changes, first[:1], picture)
        say(f"Picture: {picture}")


def limits(
    data: DataOption,
    networks: NetworksArgument = None,
    images: ImagesOption = 2048,
    device: DeviceOption = "",
    as_json: AsJson = False,
) -> None:
    """Measure what a network's arithmetic bears: statistics of the batch, bfloat16, inputs that are too large."""
    from gsanet.stress import measure_limits, mix

    opened = _open(networks, data, images, device)
    found = []
    for _, classifier, held_out in opened:
        batches = mix(held_out.val.batches())
        found.append(measure_limits(classifier, track(batches, classifier.name, console=errors, transient=True)))
    _say_skipped(opened)
    show(_as_json(data, opened, found), _show_limits(found, _labels(opened), data), as_json)


class Opened(NamedTuple):
    """A network, what it was loaded from, and the images that it is to see."""

    source: str
    classifier: Any
    held_out: Any


def _open(networks: Sequence[str] | None, data: str, images: int, device: str) -> list[Opened]:
    """All are opened first: what does not fit is said before a long measurement."""
    from gsanet.devices import check_device
    from gsanet.predict import DEFAULT
    from gsanet.stress import load_any, open_images

    if device:
        check_device(device)
    loaded = [(source, load_any(source, device or None)) for source in networks or [DEFAULT]]
    return [Opened(source, network, open_images(network, data, images or None)) for source, network in loaded]


def _say_skipped(opened: Sequence[Opened]) -> None:
    """Which images could not be decoded: the same for all networks."""
    from gsanet.train.data.damage import skipped_words

    if skipped := skipped_words(opened[0].held_out.bad_files()):
        say(skipped)


def _labels(opened: Sequence[Opened]) -> Sequence[str]:
    """The names of networks; where two are the same those of their files, and at last all that was given."""
    sources = [each.source for each in opened]
    names = [each.classifier.name for each in opened]
    files = [Path(source).resolve().name for source in sources]
    return next((each for each in (names, files) if len(set(each)) == len(each)), sources)


def _as_json(data: str, opened: Sequence[Opened], found: Sequence[Any]) -> dict[str, Any]:
    rows = [{"weights": each.source, **row.to_json()} for each, row in zip(opened, found, strict=True)]
    return {"data": data, "networks": rows}


def _show_stress(found: Sequence[Any], labels: Sequence[str], data: str) -> Iterator[Table | str]:
    """A row for each change, and for each network its accuracy and, dim, how much of the unchanged one that is."""
    from gsanet.train.data.sources import data_name
    from gsanet.train.evaluate import overflow_words

    yield f"Top-1 (%) on {found[0].images:,} held-out images of {escape(data_name(data))}"
    table = Table(box=None, pad_edge=False)
    table.add_column("Change", no_wrap=True)
    for label in labels:
        table.add_column(escape(label), justify="right", overflow="fold")
    for change in found[0].accuracies:
        table.add_row(change, *(_kept(row.accuracies[change]) for row in found))
    yield table
    yield "Dim: the share that is kept of the accuracy on unchanged images."
    yield f"One standard error is up to {max(row.standard_error for row in found):.1f} points."
    for row, label in zip(found, labels, strict=True):
        overflowed = sum(accuracy.overflowed for accuracy in row.accuracies.values())
        if overflowed:
            yield f"{escape(label)}, all changes together: {overflow_words(overflowed)}, counted as wrong"


def _show_limits(found: Sequence[Any], labels: Sequence[str], data: str) -> Iterator[Table | str]:
    """A table for each network: accuracy, largest output and overflows in each case."""
    from gsanet.train.data.sources import data_name

    for row, label in zip(found, labels, strict=True):
        table = Table(
            title=f"{escape(label)}, {escape(data_name(data))}", title_justify="left", box=None, pad_edge=False
        )
        table.add_column("Case", no_wrap=True)
        for heading in ("Images", "Top-1 (%)", "Largest logit", "Not finite"):
            table.add_column(heading, justify="right")
        for name, case in row.cases.items():
            top1 = "" if case.top1 is None else f"{case.top1:.2f}"
            largest = "" if case.largest is None else f"{case.largest:.3g}"
            table.add_row(name, f"{case.images:,}", top1, largest, f"{case.overflowed:,}")
        yield table
    yield "As evaluated: float32, running statistics. An image whose output is not finite counts as wrong."


def _kept(accuracy: Any) -> str:
    kept = "" if accuracy.kept is None else f"{accuracy.kept:.0%}"
    return f"{accuracy.top1:.2f} [dim]{kept:>4}[/]"
