"""What all commands share: the application, its exit codes, and what failures and warnings look like from a shell."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from typer.core import TyperGroup

from jostle._version import __version__
from jostle.errors import ChainsFailedError, InputError, JostleWarning, RankLostError, StorageError

if TYPE_CHECKING:
    from jostle.runs.run import Run

Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory of a run.", show_default=False)]
Query = Annotated[int, typer.Option("--query", "-q", metavar="I", min=0, help="Which query example.")]
Normalize = Annotated[bool, typer.Option("--normalize/--covariance", help="Correlations, or −covariances.")]


def kappa_of(word: Any) -> Any:
    """Return what was written: a number, or auto."""
    try:
        return word if word == "auto" else float(word)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"{word!r} is neither a number nor auto") from error


Kappa = Annotated[
    Any,
    typer.Option(
        parser=kappa_of, metavar="K|auto", help="Read at a larger n_beta: 10, or auto, as far as the draws support."
    ),
]
Reduction = Annotated[Literal["mean", "sum"], typer.Option(help="What a sequence's loss is of its tokens' losses.")]


INTERRUPTED = "interrupted; the same command goes on with what is there by now, or begins again"


class ExitCode(IntEnum):
    """What a command tells the shell, where it is not 0."""

    BAD_INPUT = 2
    CHAIN_FAILED = 3
    DAMAGED = 4
    """What `jostle check` found."""
    STORAGE = 74
    """EX_IOERR of sysexits.h: once the disk is well, the same command goes on."""
    INTERRUPTED = 75
    """EX_TEMPFAIL of sysexits.h: the same command, given again, goes on."""


WrongWords: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What a command line that cannot be read raises, whichever version of Click reads it."""


class _Commands(TyperGroup):
    """The commands together: whatever goes wrong by name in any of them becomes one line and an exit code."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Read the command line, run what it asks for, and leave with an exit code."""
        try:
            code = super().main(*arguments, standalone_mode=False, **options)
        except WrongWords as error:
            if not standalone_mode:
                raise
            message = error.format_message().rstrip(".")
            named = next((word for word in sys.argv[1:] if word in self.commands), None)
            of = error.ctx.command_path if getattr(error, "ctx", None) else " ".join(filter(None, ("jostle", named)))
            if message:  # none where help was shown because nothing was asked for
                say(f"{message[:1].lower()}{message[1:]}; {of} --help shows what there is")
            sys.exit(error.exit_code)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with warnings.catch_warnings(), _log_as_lines():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except InputError as error:
                raise _failure(str(error), ExitCode.BAD_INPUT) from error
            except StorageError as error:
                raise _failure(str(error), ExitCode.STORAGE) from error
            except ChainsFailedError as error:
                raise _failure(str(error), ExitCode.CHAIN_FAILED) from error
            except RankLostError as error:
                raise _failure(str(error), ExitCode.INTERRUPTED) from error
            except KeyboardInterrupt as error:
                raise _failure(str(error) or INTERRUPTED, ExitCode.INTERRUPTED) from error


class _Lines(logging.Handler):
    """What is logged, as the rest that a command says."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


@contextlib.contextmanager
def _log_as_lines() -> Iterator[None]:
    log, lines = logging.getLogger("jostle"), _Lines(logging.WARNING)
    log.addHandler(lines)
    try:
        yield
    finally:
        log.removeHandler(lines)


def _failure(message: str, code: ExitCode) -> typer.Exit:
    """Say on stderr what went wrong, once for all ranks of a run, and return the exit to raise."""
    prefix = sys.modules["jostle.ranks"].speaks() if "jostle.ranks" in sys.modules else ""
    if prefix is not None:
        say(prefix + message)
    return typer.Exit(code)


def say(message: str) -> None:
    """Say something on stderr, in one line."""
    # Not by rich: a message may quote anything, and square brackets in it are not markup. Nor by typer, which would
    # write into the line of a progress bar.
    print(f"jostle: {' '.join(message.splitlines())}", file=sys.stderr, flush=True)


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
        say(f"warning: {message}")
    else:
        typer.echo(warnings.formatwarning(message, category, filename, lineno, line), nl=False, err=True)


def finish(run: Run) -> None:
    """End a command that sampled; its failed chains were named in warnings, and the exit code repeats it."""
    if run.failed_chains:
        raise typer.Exit(ExitCode.CHAIN_FAILED)


def examples(*commands: tuple[str, str]) -> str:
    """Commands and what they do, for the end of a help page."""
    # Each under what it does: beside it, a narrow terminal would break the line within what is to be typed.
    lines = [f"  [dim]# {meaning}[/]\n  [bold cyan]{command}[/]" for command, meaning in commands]
    return "\n".join(["[bold]Examples[/]", *lines])


def in_panels(panels: Mapping[str, Sequence[str]]) -> Callable[[Callable[..., Any]], Any]:
    """Group the options of a command by what they are about; each group has columns of its own widths."""

    def decorate(command: Any) -> Any:
        signature = inspect.signature(command, eval_str=True)
        for title, names in panels.items():
            for name in names:
                signature.parameters[name].annotation.__metadata__[0].rich_help_panel = title
        command.__signature__ = signature
        command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
        return command

    return decorate


def with_flags_of(other: Callable[..., Any], *, without: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
    """Let a command take the flags of another one as well; they arrive as its ``**flags``."""

    def decorate(command: Any) -> Any:
        own = {
            name: parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        theirs = inspect.signature(other, eval_str=True).parameters
        parameters = own | {name: theirs[name] for name in theirs if name not in own and name not in without}
        ordered = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
        command.__signature__ = inspect.Signature(ordered)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return command

    return decorate


def only_given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that were on the command line."""
    return {name: value for name, value in flags.items() if value is not None}


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,  # what has no name is a bug, and a plain traceback is what a report needs
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        ("jostle demo", "a first look: a small language model, in about a minute"),
        ("jostle run runs/a --model ./model --train train.jsonl --query query.jsonl", "a language model"),
        ("jostle top runs/a --query 3", "what shaped query 3"),
        ("jostle run --help", "every command explains itself"),
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
