"""The command `gsanet`: parse, call, print."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape

import gsanet
from gsanet.cli import files, looking, networks, paper, stress, training
from gsanet.cli.common import errors
from gsanet.devices import keep_freed_memory

# Under the headings that `gsanet --help` has.
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Look": {
        "predict": looking.predict,
        "explain": looking.explain,
        "balance": looking.show_balance,
        "explore": looking.explore,
    },
    "Train": {
        "demo": training.demo,
        "train": training.train,
        "eval": training.evaluate,
        "preview": training.preview,
    },
    "Compare": {
        "models": networks.models,
        "info": networks.info,
        "bench": networks.bench,
        "stress": stress.stress,
        "limits": stress.limits,
    },
    "Pass on": {
        "export": files.export,
        "publish": files.publish_run,
        "pack": files.pack_run,
    },
}
GROUPS = {"Train": {"recipes": training.recipes}, "Compare": {"paper": paper.paper}}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Global self-attention networks for image recognition.",
)
for _heading, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_heading)(_command)
for _heading, _groups in GROUPS.items():
    for _name, _group in _groups.items():
        app.add_typer(_group, name=_name, rich_help_panel=_heading)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    """Options of the command itself."""
    if version:
        print(gsanet.__version__)
        raise typer.Exit


# What the command line itself gets wrong. typer has such errors from a click of its own or another, by its version.
Misuse: type[Any] = typer.BadParameter.mro()[2]


def main() -> None:
    """Run the command; what the user got wrong is one line and exit code 2, without a traceback."""
    keep_freed_memory()
    try:
        code = app(standalone_mode=False)
    except Misuse as error:
        code = _explain(error)
    except (ValueError, TypeError, OSError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        code = 2
    except typer.Abort:
        code = 1
    sys.exit(code or 0)


def _explain(error: Any) -> int:
    """Say what is wrong with a command line; one that says nothing has been answered with help."""
    if type(error).__name__ != "NoArgsIsHelpError":
        context = getattr(error, "ctx", None)
        help_at = f" (`{context.command_path} --help`)" if context is not None else ""
        words = f"{error.format_message().rstrip('.')}{help_at}"
        errors.print(f"[red]error:[/] {escape(words)}", highlight=False, soft_wrap=True)
    return int(error.exit_code)
