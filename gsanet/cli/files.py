"""`gsanet export`, `publish` and `pack`: networks for others."""

from pathlib import Path
from typing import Annotated

import typer

from gsanet.cli.common import check_writable, console, parse_size, say


def export(
    out: Annotated[Path, typer.Option(help="The file to write: .onnx, or .pt2 for exported.")],
    model: Annotated[
        str,
        typer.Argument(help="From `gsanet models`; or local-dir:FOLDER, hf-hub:USER/NAME.", show_default=False),
    ] = "",
    weights: Annotated[Path | None, typer.Option(help="Weights of the network: a safetensors file.")] = None,
    run: Annotated[Path | None, typer.Option(help="A run directory, in the place of MODEL and --weights.")] = None,
    format: Annotated[str, typer.Option(help="onnx, or exported: an archive for torch.export.load.")] = "onnx",
    img_size: Annotated[
        str, typer.Option(help="Image size, as 224 or 160x96. Default: what the network was made for.")
    ] = "",
    opset: Annotated[int, typer.Option(help="Of ONNX, 18 or later.")] = 18,
    fuse: Annotated[bool, typer.Option(help="Fold batch norms into what they follow.")] = True,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Option of a named network, such as groups=[2,3,4].")
    ] = None,
) -> None:
    """Write a network to a file that runs without this package, and check it against PyTorch on photographs."""
    from gsanet.export import check_request, export_model, open_network
    from gsanet.train.recipe import parse_overrides

    size = parse_size(img_size)
    kind = check_request(out, format, opset)
    check_writable(out)
    source = open_network(model, weights, run, size, parse_overrides(settings or []))
    say(source.weights)
    found = export_model(
        source.model, out, kind, img_size=size, opset=opset, fuse=fuse, class_names=source.class_names, report=say
    )
    for line in (
        f"written: {found.file} ({found.size / 1e6:.1f} MB)",
        f"input:   {found.inputs}",
        f"output:  {found.outputs}",
        f"largest difference from PyTorch: {found.difference:.1e} of the largest logit",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def publish_run(
    run: Annotated[Path, typer.Option(help="A run directory: its best weights are published.")],
    repo: Annotated[str, typer.Option(help="USER/NAME on the Hugging Face Hub; made if need be.")],
    folder: Annotated[Path | None, typer.Option(help="Write the files here and upload nothing.")] = None,
    license: Annotated[str, typer.Option(help="Of the weights, as the Hub spells it.")] = "apache-2.0",
) -> None:
    """Publish the network of a run on the Hugging Face Hub: weights, options, classes, preprocessing, a model card."""
    from gsanet.hub import publish

    where = publish(run, repo, folder, license, say)
    console.print(f"published: {where}" if folder is None else f"written: {where}", highlight=False, soft_wrap=True)
    source = repo if folder is None else folder
    console.print(f'to use it: gsanet.from_pretrained("{source}")', highlight=False, soft_wrap=True, markup=False)


def pack_run(
    run: Annotated[Path, typer.Option(help="A run directory.")],
    out: Annotated[Path, typer.Option(help="The file to write: .safetensors.")],
    checkpoint: Annotated[str, typer.Option(help="Which weights of the run: last or best.")] = "last",
    data: Annotated[
        str, typer.Option(help="Evaluate what was written on this data set. Default: the run's figures.")
    ] = "",
    license: Annotated[str, typer.Option(help="Of the weights, as the Hub spells it.")] = "apache-2.0",
    note: Annotated[str, typer.Option(help="What the licence does not say, such as the terms of the data.")] = "",
) -> None:
    """Turn a run into one file that holds all: bf16 weights, network, classes, preprocessing, recipe, metrics."""
    from gsanet.pack import pack

    found = pack(run, out, checkpoint=checkpoint, data=data, license=license, note=note, report=say)
    console.print(f"written: {out} ({out.stat().st_size / 1e6:.2f} MB)", highlight=False, soft_wrap=True)
    console.print(f"metrics: {found.summary}", highlight=False, soft_wrap=True)
    console.print(
        f'to use it: gsanet.create_model("{found.model}", pretrained="{out}")',
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
