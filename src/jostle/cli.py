"""The command line: the words of every command, and what its failures look like from a shell.

A command imports what it needs when it runs, so that ``jostle --help`` does not wait for torch.
"""

from __future__ import annotations

import warnings
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from jostle._version import __version__
from jostle.errors import ChainsFailedError, InputError, JostleWarning

if TYPE_CHECKING:
    from jostle.run import Run


class ExitCode(IntEnum):
    """What a command tells the shell, where it is not 0."""

    BAD_INPUT = 2
    CHAIN_FAILED = 3
    INTERRUPTED = 75
    """EX_TEMPFAIL of sysexits.h: the same command, given again, goes on."""


class _Commands(TyperGroup):
    """The commands together: whatever goes wrong by name in any of them becomes one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except InputError as error:
                raise _failure(str(error), ExitCode.BAD_INPUT) from error
            except ChainsFailedError as error:
                raise _failure(str(error), ExitCode.CHAIN_FAILED) from error
            except KeyboardInterrupt as error:
                raise _failure("interrupted; the same command goes on where it stood", ExitCode.INTERRUPTED) from error


def _failure(message: str, code: ExitCode) -> typer.Exit:
    """Say on stderr what went wrong, and return the exit to raise."""
    _say(message)
    return typer.Exit(code)


def _say(message: str) -> None:
    # Plain echo, not rich: a message may quote anything, and square brackets in it are not markup.
    typer.echo(f"jostle: {' '.join(message.splitlines())}", err=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as one line; where in the source they were given helps nobody at a shell."""
    if issubclass(category, JostleWarning):
        _say(f"warning: {message}")
    else:
        typer.echo(warnings.formatwarning(message, category, filename, lineno, line), nl=False, err=True)


def _finish(run: Run) -> None:
    """End a command that sampled; its failed chains were named in warnings, and the exit code repeats it."""
    if run.failed_chains:
        raise typer.Exit(ExitCode.CHAIN_FAILED)


def _examples(*commands: tuple[str, str]) -> str:
    """Commands and what they do, for the end of a help page."""
    width = max(len(command) for command, _ in commands)
    lines = [f"  [bold cyan]{command:{width}}[/]  [dim]{meaning}[/]" for command, meaning in commands]
    return "\n".join(["[bold]Examples[/]", *lines])


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,  # what has no name is a bug, and a plain traceback is what a report needs
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples(
        ("jostle demo", "a first look: digits, in under a minute"),
        ("jostle demo --help", "every command explains itself"),
    ),
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jostle {__version__}")
        raise typer.Exit


@app.callback()
def _jostle(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Which training examples shaped what this model does here?

    Jostle the weights, and see which losses move together: training data
    attribution by local Bayesian influence functions, for any differentiable
    PyTorch model and without a Hessian.
    """


@app.command(
    epilog=_examples(
        ("jostle demo", "then open jostle-demo/influence.png"),
        ("jostle demo --out digits --seed 1", "another split, another classifier"),
    )
)
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False, help="Where the picture and the run go.")] = Path(
        "jostle-demo"
    ),
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="The only source of randomness.")] = 0,
) -> None:
    """Train a small digit classifier, and see which images shaped it.

    For a few test images it prints the training images that helped and harmed
    most, and draws them in [bold]DIR/influence.png[/]. The run stays in [bold]DIR/run[/]:
    the same command, given again, only reads it.
    """
    from jostle.demo import images

    _finish(images.demonstrate(out, seed=seed))


def main() -> None:
    """Run the command line."""
    app(prog_name="jostle")
