"""`gsanet predict`, `explain`, `balance` and `explore`: what a network sees, and how."""

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from gsanet.cli.common import AsJson, DeviceOption, Settings, check_writable, console, errors, read_overrides, show
from gsanet.words import count

ImagesArgument = Annotated[
    list[str], typer.Argument(help="Files, folders (with all below them) and http(s) addresses.")
]
RunOption = Annotated[Path | None, typer.Option("--run", help="A run directory of `gsanet train`; its best weights.")]
ModelOption = Annotated[str, typer.Option("--model", help="Without --run: the network.")]
WeightsOption = Annotated[
    Path | None, typer.Option("--weights", help="Without --run: its weights (safetensors). Default: the package's.")
]
FEW = 8  # images up to which each has a table of its own


def predict(
    images: ImagesArgument,
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    top: Annotated[int, typer.Option(help="How many classes to show, the likeliest first.", min=1)] = 5,
    device: DeviceOption = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Say what images show. An image that cannot be read is named at the end; exit code 1 if none could be."""
    from gsanet.images import find_images
    from gsanet.predict import predict_images

    classifier = _load_classifier(run, model, weights, settings, device)
    sources = find_images(images)
    found = predict_images(classifier, sources, top)
    predictions = list(track(found, description="Predicting", total=len(sources), console=errors, transient=True))
    failed = [prediction for prediction in predictions if prediction.error]
    answered = [prediction for prediction in predictions if not prediction.error]
    show([prediction.to_json() for prediction in predictions], show_predictions(answered), as_json)
    _name_failed([each.error for each in failed], len(predictions), "classified")
    if len(failed) == len(predictions):
        raise typer.Exit(1)


def explain(
    image: Annotated[str, typer.Argument(help="A file, or an http(s) address.")],
    at: Annotated[str, typer.Option(help="The pixel, as X,Y: to the right and down from 0,0 at the top left.")],
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    stage: Annotated[int | None, typer.Option(help="Which stage, from 1. Default: 3, else the last with GSA.")] = None,
    block: Annotated[int | None, typer.Option(help="Which block of it, from 1. Default: the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Which head, from 1. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="The picture. Default: IMAGE-explain.png, in this folder.")] = None,
    npz: Annotated[Path | None, typer.Option(help="The numbers. Default: as the picture, with .npz.")] = None,
    device: DeviceOption = "",
    settings: Settings = None,
) -> None:
    """Draw where a pixel takes from in a GSA module: the exact weights of content, column and row."""
    import numpy as np

    from gsanet.explain.figure import draw
    from gsanet.explain.image import explain_image, place_of
    from gsanet.images import read_image

    place = _parse_place(at)
    out = out or Path(f"{Path(image).stem}-explain.png")
    npz = npz or out.with_suffix(".npz")
    check_writable(out, picture=True)
    check_writable(npz)
    picture = read_image(image)
    classifier = _load_classifier(run, model, weights, settings, device)
    found = explain_image(classifier, picture.image, place, stage, block)
    draw(found, out, head)
    explanation = found.explanation
    arrays: dict[str, Any] = explanation.arrays()
    with npz.open("wb") as stream:  # numpy would add .npz to a name without it
        np.savez_compressed(stream, **arrays)
    if picture.note:
        console.print(f"{image}: {picture.note}", soft_wrap=True, highlight=False)
    (x, y), (height, width) = explanation.pixel, explanation.size
    for line in (
        f"Class: {found.guess.name} ({found.guess.probability:.1%})",
        f"Module: {explanation.module} ({place_of(explanation.module)})",
        f"Its pixel: row {x}, column {y} on a map of {height}x{width}",
        f"Weights times values give the module's output to a relative error of {explanation.error:.0e}.",
        f"Picture: {out}",
        f"Numbers: {npz}",
    ):
        console.print(escape(line), soft_wrap=True, highlight=False)


def show_balance(
    images: ImagesArgument,
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    most: Annotated[int, typer.Option(help="Take at most so many images, evenly from all.", min=1)] = 200,
    device: DeviceOption = "",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure what each GSA module does over many images: content beside position, and how far they look."""
    from gsanet.explain.branches import balance
    from gsanet.images import UnreadableImageError, find_images, read_image

    classifier = _load_classifier(run, model, weights, settings, device)
    sources = find_images(images)
    sources = sources[:: -(-len(sources) // most)]
    unread: list[str] = []

    def inputs() -> Iterator[Any]:
        for source in track(sources, description="Measuring", console=errors, transient=True):
            try:
                yield classifier.transform(read_image(str(source)).image)
            except UnreadableImageError as error:
                unread.append(str(error))

    try:
        rows = balance(classifier.model, inputs())
    finally:
        _name_failed(unread, len(sources), "read")
    parts = _show_balance(rows, classifier.name, len(sources) - len(unread))
    show([{**asdict(row), "ratio": row.ratio} for row in rows], parts, as_json)


def explore(
    run: RunOption = None,
    model: ModelOption = "",
    weights: WeightsOption = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; 0.0.0.0 lets other machines reach it.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Default: 7860, or the next that is free.", min=0, max=65535)] = None,
    device: DeviceOption = "",
    settings: Settings = None,
) -> None:
    """Open a page in the browser: click a pixel of a picture, and see where each branch and head attends."""
    from gsanet.explore.server import check_installed, serve

    check_installed()
    classifier = _load_classifier(run, model, weights, settings, device)
    # So that what was uploaded is removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    def ready(address: str) -> None:
        console.print(f"The explorer is at {address} (Ctrl+C ends it)", highlight=False, soft_wrap=True)

    serve(classifier, host, port, ready)


def _load_classifier(run: Path | None, model: str, weights: Path | None, settings: Settings, device: str) -> Any:
    """The network that `predict`, `explain` and `explore` are about."""
    from gsanet.devices import check_device
    from gsanet.predict import load_classifier

    if device:
        check_device(device)
    return load_classifier(run, model, weights, read_overrides(settings, {}), device or None)


def _name_failed(reasons: Sequence[str], images: int, wanted: str) -> None:
    """Which of so many images could not be read or classified, if any."""
    if reasons:
        lines = [f"{len(reasons)} of {images} images could not be {wanted}:", *reasons]
        errors.print(escape("\n  ".join(lines)), highlight=False, soft_wrap=True, style="yellow")


def show_predictions(predictions: Sequence[Any]) -> list[Table | str]:
    """A table with bars for each image; of many, one table with a line for each."""
    if len(predictions) > FEW:
        table = Table(box=None, pad_edge=False)
        table.add_column("Image", no_wrap=True)
        for heading in ("Class", "", "%", "Then"):
            table.add_column(heading)
        for found in predictions:
            first, *others = found.guesses
            then = ", ".join(f"{guess.name} {guess.probability:.0%}" for guess in others)
            image = f"{found.image} ({found.note})" if found.note else found.image
            table.add_row(
                escape(_end_of(image)), escape(first.name), _bar(first.probability, 12), _percent(first), escape(then)
            )
        return [table]
    parts: list[Table | str] = []
    for found in predictions:
        title = f"{found.image} ({found.note})" if found.note else found.image
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, max_width=40)
        for guess in found.guesses:
            table.add_row(escape(guess.name), _bar(guess.probability, 30), _percent(guess))
        parts += [f"[bold]{escape(title)}[/]", table]
    return parts


def _show_balance(rows: Sequence[Any], network: str, images: int) -> Iterator[Table | str]:
    """A line for each module, and what its columns mean."""
    from gsanet.explain.image import place_of

    table = Table(title=f"{network}, {count(images, 'image')}", box=None, pad_edge=False)
    table.add_column("Module", no_wrap=True)
    for heading in ("Map", "Content /\nposition", "Pixels that\nkeys choose", "", "Looks along\na column", "a row"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        lengths = ("" if value is None else f"{value:.1f}" for value in (row.column, row.row))
        table.add_row(
            place_of(row.module),
            "x".join(map(str, row.size)),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.seen is None else f"{row.seen:.1%}",
            "" if row.seen is None else _bar(row.seen, 8),
            *lengths,
        )
    yield table
    yield "Content / position: the sizes of the two outputs that are added."
    yield "Pixels that keys choose: 100 % if the softmax weighs all alike; content attention is then pooling."
    yield "Looks along: the mean distance of what positional attention weighs, in pixels of the map."


def _end_of(name: str) -> str:
    """At most half a line of a long name: of images in one folder the end says which it is."""
    room = console.width // 2
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _bar(share: float, width: int) -> Bar:
    return Bar(1.0, 0.0, share, width=width, color="green")


def _percent(guess: Any) -> str:
    return f"{guess.probability:6.1%}"


def _parse_place(text: str) -> tuple[int, int]:
    parts = text.replace(" ", "").split(",")
    if len(parts) != 2 or not all(part.lstrip("-").isdigit() for part in parts):
        raise ValueError(f"--at takes a pixel as X,Y, such as 120,64, got {text!r}")
    return int(parts[0]), int(parts[1])
