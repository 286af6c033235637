"""The command line: the words of every command, and what its failures look like from a shell.

A command imports what it needs when it runs, so that ``jostle --help`` does not wait for torch.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer
from typer.core import TyperGroup

from jostle._version import __version__
from jostle.errors import ChainsFailedError, InputError, JostleWarning, RankLostError, StorageError

if TYPE_CHECKING:
    from jostle.run import Run


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
            except StorageError as error:
                raise _failure(str(error), ExitCode.STORAGE) from error
            except ChainsFailedError as error:
                raise _failure(str(error), ExitCode.CHAIN_FAILED) from error
            except RankLostError as error:
                raise _failure(str(error), ExitCode.INTERRUPTED) from error
            except KeyboardInterrupt as error:
                raise _failure("interrupted; the same command goes on where it stood", ExitCode.INTERRUPTED) from error


def _failure(message: str, code: ExitCode) -> typer.Exit:
    """Say on stderr what went wrong, once for all ranks of a run, and return the exit to raise."""
    prefix = sys.modules["jostle.ranks"].speaks() if "jostle.ranks" in sys.modules else ""
    if prefix is not None:
        _say(prefix + message)
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


def _with_flags_of(other: Callable[..., Any], *, without: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]:
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


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,  # what has no name is a bug, and a plain traceback is what a report needs
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=_examples(
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


@app.command(
    epilog=_examples(
        ("jostle demo", "then open jostle-demo/words.png"),
        ("jostle demo --out words --seed 1", "the same model, other draws"),
        ("jostle demo images", "then open jostle-demo-images/influence.png"),
    )
)
def demo(
    what: Annotated[
        Literal["language", "images"], typer.Argument(metavar="language|images", help="Which model.")
    ] = "language",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Where picture and run go. Default: jostle-demo[-images]."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="The only source of randomness.")] = 0,
) -> None:
    """See which words a small language model learns from one another.

    The model is shipped with Jostle; it read English and French sentences with
    their translations. For a few words the demo prints the training words whose
    losses move with theirs, and draws them in [bold]DIR/words.png[/]. What belongs
    together is known, so it also says how much of that is found.

    [bold]images[/] trains a digit classifier instead, and draws the training images that
    helped and harmed most in [bold]DIR/influence.png[/].

    The run stays in [bold]DIR/run[/]: the same command, given again, only reads it.
    """
    if what == "images":
        from jostle.demo import images

        _finish(images.demonstrate(out or Path("jostle-demo-images"), seed=seed))
    else:
        from jostle.demo import language

        _finish(language.demonstrate(out or Path("jostle-demo"), seed=seed))


_Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory of a run.", show_default=False)]
_Shards = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Spread each model over N ranks of torchrun (FSDP2).")
]
_Query = Annotated[int, typer.Option("--query", "-q", metavar="I", min=0, help="Which query example.")]
_Normalize = Annotated[bool, typer.Option("--normalize/--covariance", help="Correlation, or −covariance.")]
_RISE = "With --auto: how far, in mean loss over the checkpoint's, influence is read."
_KAPPA = "With --auto: curvature of the losses over localization; 0 is the control without a gradient."
_Reduction = Annotated[Literal["mean", "sum"], typer.Option(help="What a sequence's loss is of its tokens' losses.")]


@app.command(
    epilog=_examples(
        ("jostle run runs/a --model ./model --train train.jsonl --query query.jsonl", "attention moves"),
        ("jostle run runs/b --model ./model --train t.jsonl --query q.jsonl --preset scaling", "as in the paper"),
        ("jostle run runs/c --task my_file.py:build --weights all", "a model of your own"),
        ("jostle run runs/d --config runs/a/config.yaml", "the same again"),
        ("jostle run runs/e ... --dry-run", "what it will take: memory, disk, time"),
        ("jostle run runs/e ... --until ess=400 --draws 2000 --minutes 30", "as long as it takes, or half an hour"),
        ("jostle run runs/f --task my_file.py:build --auto", "hyperparameters from measurements"),
        ("torchrun --nproc-per-node 8 -m jostle run runs/g ...", "chains on 8 GPUs"),
    )
)
def run(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the run goes.", show_default=False)],
    model: Annotated[str | None, typer.Option(metavar="DIR|ID", help="A causal LM: a directory or a hub id.")] = None,
    train: Annotated[str | None, typer.Option(metavar="FILE", help="Training texts to score.")] = None,
    query: Annotated[str | None, typer.Option(metavar="FILE", help="Texts or prompt-completion pairs.")] = None,
    sampling: Annotated[
        str | None, typer.Option(metavar="FILE", help="What minibatches are drawn from. Default: the training texts.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="FILE.py:FUNCTION", help="A task of your own, instead.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="YAML", help="The config.yaml of a run, to repeat it.")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Hyperparameters of the paper's experiments.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose what is not given from measurements (see jostle calibrate).")
    ] = False,
    rise: Annotated[float | None, typer.Option(metavar="NATS", help=_RISE)] = None,
    kappa: Annotated[float | None, typer.Option(metavar="κ", help=_KAPPA)] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="GROUP|GLOB", help="Which weights move. For an LM: attention.")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="sgld, rmsprop, rmsprop-devinterp, leimkuhler-matthews, ornstein-uhlenbeck, baoab, sgnht or gaussian "
            "(no gradient: the control).",
        ),
    ] = None,
    step_size: Annotated[float | None, typer.Option(metavar="ε", help="The size of a step.")] = None,
    friction: Annotated[float | None, typer.Option(metavar="Γ", help="Of baoab and sgnht; 1 is critical.")] = None,
    n_beta: Annotated[float | None, typer.Option(metavar="nβ", help="Effective number of samples.")] = None,
    localization: Annotated[float | None, typer.Option(metavar="γ", help="Pull towards the checkpoint.")] = None,
    chains: Annotated[int | None, typer.Option(metavar="C", help="Number of chains.")] = None,
    draws: Annotated[
        int | None, typer.Option(metavar="T", help="Draws from each chain; with --until or --minutes, at most.")
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ess=N|error=E",
            help="Stop at so many effective draws, or so small a standard error of each query's top scores.",
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(metavar="MIN", help="Stop when they are over.")] = None,
    burn_in: Annotated[int | None, typer.Option(metavar="B", help="Steps before the first draw.")] = None,
    thin: Annotated[
        str | None,
        typer.Option(
            metavar="K|auto", help="Steps between draws. Default: auto, for the most effective draws a second."
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(metavar="M", help="Examples in a minibatch.")] = None,
    control_variates: Annotated[
        bool | None,
        typer.Option(
            "--control-variates/--no-control-variates", help="Less minibatch noise, for two gradients a step."
        ),
    ] = None,
    antithetic: Annotated[
        bool | None, typer.Option("--antithetic/--no-antithetic", help="Chains in pairs with opposite noise.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(metavar="N", help="Cut sequences after N tokens.")] = None,
    precision: Annotated[
        Literal["model", "bfloat16"] | None,
        typer.Option(help="Of matrix products: the model's own, or bfloat16, which GPUs are fast in."),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile. Default: on a GPU, for long runs.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The only source of randomness.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cuda, cpu, ... Default: a GPU if any.")] = None,
    shards: _Shards = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what it will take, after a few timed steps; write nothing.")
    ] = False,
) -> None:
    r"""Sample around a checkpoint and record every token's loss.

    Texts are JSONL ([bold]text[/], or [bold]prompt[/] and [bold]completion[/], or chat [bold]messages[/]), plain text
    with an example a line, CSV, Parquet, or a Hugging Face data set ([bold]DIR:train\[:400][/]).
    The same command, given again, goes on where it was interrupted; with larger [bold]--draws[/] or
    [bold]--chains[/], it adds to what is there.
    """
    given = _given({name: value for name, value in locals().items() if name not in _NOT_SETTINGS})
    from jostle import ranks, requests

    ranks.join()
    if not auto and (rise is not None or kappa is not None):
        raise InputError("rise" if rise is not None else "kappa", got="no --auto", expected="--auto, which it is for")
    if auto and (shards or 1) > 1:
        raise InputError("shards", got="--auto", expected="the config of jostle calibrate", fix="--config FILE")
    # A run that was begun goes on with what was chosen then.
    begun = auto and (out / "manifest.json").is_file()
    request = requests.resolve(given, config=out / "config.yaml" if begun else config, preset=preset)
    loaded = None

    def calibrated() -> dict[str, Any]:
        nonlocal loaded
        chosen, _, loaded = requests.calibrated(request, given, rise=rise, kappa=kappa, say=_say)
        return chosen

    if auto and not begun:
        with ranks.Ranks() as group:
            request = group.share(calibrated)
    _carry_out(request, out, task=loaded, dry_run=dry_run)


@app.command(
    epilog=_examples(
        ("jostle resume runs/a", "after Ctrl-C, a crash, a full disk, or a preempted job (exit code 75)"),
        ("jostle resume runs/a --device cpu", "elsewhere; the model must come to the same numbers there"),
    )
)
def resume(
    out: _Out,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Default: where the run began.")] = None,
    shards: _Shards = None,
) -> None:
    """Go on with a run that was interrupted, to the same numbers as if it had not been.

    Model, data and settings are those of its [bold]config.yaml[/]. A finished run is only read.
    """
    from jostle import ranks, requests

    ranks.join()
    _carry_out(requests.of_run(out, _given({"device": device, "shards": shards})), out)


@app.command(
    epilog=_examples(
        ("jostle extend runs/a --draws 400", "400 draws of each chain in all; those that are there stay"),
        ("jostle extend runs/a --chains 8", "8 chains in all"),
    )
)
def extend(
    out: _Out,
    draws: Annotated[int | None, typer.Option(metavar="T", min=1, help="Draws of each chain, in all.")] = None,
    chains: Annotated[int | None, typer.Option(metavar="C", min=1, help="Chains, in all.")] = None,
    shards: _Shards = None,
) -> None:
    """Add draws or chains to a run, to the same numbers as if it had had them from the start.

    If it is interrupted, [bold]jostle resume[/] goes on.
    """
    from jostle import ranks, requests

    ranks.join()
    if draws is None and chains is None:
        raise InputError("extend", got="neither --draws nor --chains", expected="one of them")
    _carry_out(requests.of_run(out, _given({"draws": draws, "chains": chains, "shards": shards})), out)


@app.command(
    epilog=_examples(
        ("jostle check runs/a", "one line for each finding; exit code 0 where all is well"),
        ("jostle check runs/a && jostle top runs/a", "for a script: 4 damaged, 75 unfinished, 3 a chain failed"),
    )
)
def check(out: _Out) -> None:
    """Read every byte of a run, and say what is damaged, missing or unfinished.

    Fingerprints, checksums, shapes, finite values and status. Model and data are
    not looked at: [bold]jostle resume[/] compares those.
    """
    from jostle.integrity import examine

    findings = examine(out)
    for finding in findings:
        typer.echo(" ".join(str(finding).splitlines()))
    kinds = {finding.kind for finding in findings}
    if not kinds:
        typer.echo(f"{out}: whole")
    codes = {
        "damaged": ExitCode.DAMAGED,
        "unfinished": ExitCode.INTERRUPTED,
        "failed chain": ExitCode.CHAIN_FAILED,
    }
    for kind, code in codes.items():
        if kind in kinds:
            raise typer.Exit(code)


def _carry_out(request: dict[str, Any], out: Path, *, task: Any = None, dry_run: bool = False) -> None:
    """Sample, and end with a verdict."""
    from jostle import ranks, requests

    def say(message: str) -> None:
        if ranks.leads():
            _say(message)

    def show_plan(lines: list[str]) -> None:
        if ranks.leads():
            typer.echo("\n".join(lines))
        raise typer.Exit

    finished = requests.carry_out(request, out, say=say, task=task, dry_run=show_plan if dry_run else None)
    if not ranks.leads():
        return
    from rich.console import Console

    from jostle.terminal import print_summary

    print_summary(Console(highlight=False), finished.diagnostics(), str(out))
    if finished.stopped:
        _say(finished.stopped)
    _finish(finished)


_NOT_SETTINGS = ("out", "config", "preset", "auto", "rise", "kappa", "dry_run")


@app.command(
    epilog=_examples(
        (
            "jostle calibrate lm.yaml --model ./model --train t.jsonl --query q.jsonl",
            "then jostle run ... --config lm.yaml",
        ),
        ("jostle calibrate mine.yaml --task my_file.py:build --rise 0.3", "farther from the checkpoint"),
        ("jostle calibrate mine.yaml --task my_file.py:build --localization 500", "the rest, for this localization"),
    )
)
@_with_flags_of(run, without=("out", "auto", "dry_run"))
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="YAML", help="Where the settings go.", show_default=False)],
    rise: Annotated[float | None, typer.Option(metavar="NATS", help=_RISE.removeprefix("With --auto: "))] = None,
    kappa: Annotated[float | None, typer.Option(metavar="κ", help=_KAPPA.removeprefix("With --auto: "))] = None,
    **flags: Any,
) -> None:
    """Choose hyperparameters from measurements, with a reason for each.

    The localization from how far the mean loss is to rise, n_beta from the
    largest curvature, a step size that is stable for both, and a short pilot.
    Flags that are given are kept. [bold]jostle run OUT --config YAML[/] samples with the result.
    """
    import yaml
    from rich.console import Console

    from jostle import requests
    from jostle.terminal import print_calibration

    if file.suffix not in (".yaml", ".yml"):
        raise InputError("YAML", got=str(file), expected="the name of a file ending in .yaml")
    elsewhere = {name: flags.pop(name) for name in ("config", "preset")}
    given = _given(flags)
    request = requests.resolve(given, **elsewhere)
    request, chosen, loaded = requests.calibrated(request, given, rise=rise, kappa=kappa, say=_say)
    settings = requests.to_config(request, loaded) | {"calibration": chosen.to_dict()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    print_calibration(Console(highlight=False), chosen.choices)
    typer.echo(f"{file}: jostle run OUT --config {file}")


_Values = Annotated[str | None, typer.Option(metavar="X,X,...", help="One or more values.")]


@app.command(
    epilog=_examples(
        (
            "jostle sweep sweeps/a --task my_file.py:build --n-beta 0,10,100 --localization 100,1000 --step-size 1e-4",
            "six runs, and sweeps/a/sweep.png",
        ),
        ("jostle sweep sweeps/b ... --bank banks/a", "with the LDS in each cell"),
    )
)
@_with_flags_of(run, without=("auto", "rise", "kappa", "dry_run"))
def sweep(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where runs and figures go.", show_default=False)],
    n_beta: _Values = None,
    localization: _Values = None,
    step_size: _Values = None,
    burn_in: _Values = None,
    bank: Annotated[
        Path | None, typer.Option(metavar="BANK", help="A retraining bank (see jostle evaluate) to judge scores by.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Cells sampled at the same time.")] = 1,
    **flags: Any,
) -> None:
    """Sample a grid of hyperparameters, and draw every cell's loss traces.

    In each cell stands the agreement of the scores from halves of the draws or,
    with a bank of retrained models, the linear datamodeling score (LDS).
    The same command, given again, goes on; with more values, it adds cells.
    """
    from rich.console import Console

    from jostle import plots, requests
    from jostle.evaluate import Bank
    from jostle.sweep import AGREEMENT, LDS, draw, rank
    from jostle.sweep import sweep as carry_out
    from jostle.terminal import print_sweep

    plots.check("sweep.png")
    texts = {"n_beta": n_beta, "localization": localization, "step_size": step_size, "burn_in": burn_in}
    axes = {name: _numbers(name, text) for name, text in texts.items() if text is not None}
    judge = Bank(bank) if bank is not None else None
    elsewhere = {name: flags.pop(name) for name in ("config", "preset")}
    request = requests.resolve(_given(flags), **elsewhere)
    cells = carry_out(request, axes, out, bank=judge, jobs=jobs, say=_say)
    of = LDS if judge is not None else AGREEMENT
    pictures = draw(cells, out, of=of)
    best_first = sorted(cells, key=lambda cell: rank(cell, of), reverse=True)
    print_sweep(Console(highlight=False), [cell.to_dict() for cell in best_first], of)
    for picture in pictures:
        typer.echo(str(picture))


def _numbers(name: str, text: str) -> list[float]:
    """Several values of a flag, separated by commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(name, got=repr(text), expected="numbers separated by commas") from error
    if name == "burn_in":
        if any(value != int(value) for value in values):
            raise InputError(name, got=repr(text), expected="whole numbers separated by commas")
        return [int(value) for value in values]
    return values


@app.command(
    epilog=_examples(
        ("jostle top runs/a --query 3", "the ten most helpful and most harmful"),
        ("jostle top runs/a -q 3 -k 5 --json", "for a script"),
    )
)
def top(
    out: _Out,
    query: _Query = 0,
    k: Annotated[int, typer.Option("-k", metavar="K", min=1, help="How many of each.")] = 10,
    normalize: _Normalize = True,
    reduction: _Reduction = "mean",
    standard_error: Annotated[bool, typer.Option("--error/--no-error", help="Show Monte Carlo errors.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; scores keep their sign: negative helps.")
    ] = False,
) -> None:
    """List the training examples that helped and harmed a query most."""
    import json

    from rich.console import Console

    from jostle.run import load
    from jostle.terminal import print_ranking

    opened = load(out)
    scores = opened.influence(
        normalize=normalize,
        reduction=reduction,
        standard_error=standard_error,
    )
    ranking, train, queries = scores.top(query, k), opened.examples("train"), opened.examples("query")
    if not as_json:
        print_ranking(Console(highlight=False), ranking, train, queries)
        return
    plain = ranking.to_dict()
    for entry in (*plain["helpful"], *plain["harmful"]):
        if train:
            entry["text"] = train[entry["index"]].get("text")
    typer.echo(json.dumps(plain, ensure_ascii=False))


@app.command(
    epilog=_examples(
        ("jostle show runs/a --query 3", "its completion against the three most helpful texts"),
        ("jostle show runs/a -q 3 --train 12 --token 7", "one query token against one text"),
    )
)
def show(
    out: _Out,
    query: _Query = 0,
    train: Annotated[list[int] | None, typer.Option(metavar="J", min=0, help="Which training texts.")] = None,
    token: Annotated[
        int | None, typer.Option(metavar="S", min=0, help="One token of the query, by position. Default: all of it.")
    ] = None,
    k: Annotated[int, typer.Option("-k", metavar="K", min=1, help="How many training texts, where none is named.")] = 3,
) -> None:
    """Print a query and training texts, tokens coloured by posterior correlation."""
    from rich.console import Console

    from jostle.run import load
    from jostle.terminal import legend, print_strongest, print_tokens

    opened = load(out)
    texts, queries = opened.examples("train"), opened.examples("query")
    if not texts or not queries or "tokens" not in queries[0]:
        raise InputError("show", got="a run without texts", expected="a run of a language model", fix="use jostle top")
    columns = {name: opened.traces.columns(name) for name in ("train", "query")}
    if query >= len(queries):
        raise InputError("query", got=query, expected=f"an index below {len(queries)}")
    scored = columns["query"].positions_of(query)
    if token is not None and token not in scored:
        raise InputError("token", got=token, expected=f"a scored position of the query ({scored[0]} to {scored[-1]})")
    chosen = train or [entry.index for entry in opened.influence(normalize=True).top(query, k).helpful]
    console = Console(highlight=False)
    marked = [token] if token is not None else scored
    print_tokens(console, f"query {query}", queries[query], marked=marked)
    for index in chosen:
        scores = opened.token_influence(index, query, whole_query=token is None, normalize=True)
        column = 0 if token is None else scored.index(token)
        values = scores.posterior_correlation[:, column].tolist()
        correlations = dict(zip(columns["train"].positions_of(index), values, strict=True))
        console.print()
        print_tokens(console, f"train {index}", texts[index], correlations)
        print_strongest(console, texts[index], correlations, 8)
    console.print()
    console.print(legend())


@app.command(
    epilog=_examples(
        ("jostle export runs/a scores.npy", "the matrix, train × query"),
        ("jostle export runs/a scores.parquet --covariance", "a row a pair"),
    )
)
def export(
    out: _Out,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ending in .npy, .safetensors, .csv or .parquet.")],
    normalize: _Normalize = False,
    reduction: _Reduction = "mean",
) -> None:
    """Write the scores, train × query, with the sign that negative helps."""
    from jostle.run import load

    load(out).influence(normalize=normalize, reduction=reduction).export(file)
    typer.echo(f"{file}: {'−correlation' if normalize else '−covariance'}, negative = training on it helps")


@app.command(
    epilog=_examples(
        ("jostle diagnose runs/a", "a verdict, what to do, and what it rests on"),
        ("jostle diagnose runs/a --plot runs/a.png", "with a picture"),
        ("jostle diagnose runs/a --json", "for a script: .verdict.level is good, doubtful or unreliable"),
    )
)
def diagnose(
    out: _Out,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as well; a name ending in .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether the scores of a run can be trusted, and what to do if not.

    Chains that failed or ran away, effective draws, R-hat, drift, whether halves
    of the draws rank alike, and how far the chains went from the checkpoint.
    """
    import json

    from rich.console import Console

    from jostle.run import load
    from jostle.terminal import print_diagnostics, print_verdict

    found = load(out).diagnostics(plot=plot)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    console = Console(highlight=False)
    print_verdict(console, found["verdict"])
    console.print()
    print_diagnostics(console, found)


@app.command(
    epilog=_examples(
        ("jostle evaluate banks/a runs/a", "a run beside the controls"),
        ("jostle evaluate banks/a runs/a EK-FAC=a.safetensors", "and saved scores"),
        ("jostle evaluate banks/a runs/a --figure lds.png", "with a picture"),
        ("jostle evaluate banks/removed", "removals, brittleness"),
    )
)
def evaluate(
    bank: Annotated[Path, typer.Argument(metavar="BANK", help="A retraining bank.", show_default=False)],
    scores: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]RUN|FILE...", help="Runs, or scores ending in .safetensors or .npy."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as well; a name ending in .png, .svg or .pdf.")
    ] = None,
    mislabelled: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Which labels are wrong (.npy of booleans): adds an AUROC.")
    ] = None,
    controls: Annotated[bool, typer.Option("--controls/--no-controls", help="Scores that know nothing.")] = True,
    bootstrap: Annotated[int, typer.Option(metavar="N", min=2, help="How many times all is resampled.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say how well scores predict what retraining does.

    A bank holds the losses of models that were trained on parts of the data
    ([bold]jostle.evaluate.retrain[/] fills one). The table has the linear datamodeling
    score of every method, per query and as in the paper, with 95 % intervals,
    and controls that know nothing of training.
    """
    import json

    from rich.console import Console

    from jostle import plots
    from jostle.evaluate import Bank, compare
    from jostle.evaluate.report import read_array, read_scores
    from jostle.terminal import print_report

    if figure is not None:
        plots.check(figure)
    opened = Bank(bank)
    wrong = None if mislabelled is None else read_array(mislabelled)
    read, seconds, detections, texts = read_scores(scores or [], wrong)
    report = compare(
        opened, read, texts=texts, controls=controls, seconds=seconds, mislabels=detections, bootstrap=bootstrap
    )
    if figure is not None:
        report.draw(figure)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        print_report(Console(highlight=False), report)


@app.command(
    epilog=_examples(
        ("jostle view runs/a", "opens a page in the browser; while it is sampling, too"),
        ("jostle view runs/a runs/b", "two runs, side by side"),
        ("jostle view runs/a ekfac.safetensors", "beside another method's scores"),
        ("jostle view runs/a --no-open --port 8000", "through an ssh tunnel"),
    )
)
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, and scores in .safetensors files.")
    ],
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="Default: 8797 or, if that is taken, any.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Serve others too, who need the token that is printed. Default: this machine alone."
        ),
    ] = "127.0.0.1",
) -> None:
    """Look at runs in a browser: tokens, images, health, map, comparison.

    Works without a network, and reads a run that is still sampling.
    """
    from jostle.run import Run
    from jostle.viewer.answers import Answers, open_sources

    answers = Answers(open_sources(runs, Run))
    try:
        from jostle.viewer.server import serve
    except ImportError as error:
        raise InputError(
            "view",
            got=f"no package {error.name!r}",
            expected="the packages of the extra 'viewer'",
            fix="pip install 'jostle[viewer]'",
        ) from error
    serve(answers, host=host, port=port, open_browser=open_browser, say=_say)


@app.command(
    epilog=_examples(
        ("jostle report runs/a -o report.html -q 3 -q 7", "a page to open from disk, or to mail"),
        ("jostle report runs/a ekfac.safetensors -o report.html", "two methods"),
        ("jostle report runs/a -o pair.pdf -q 3 --train 12 --token 7", "a token against a text, for a paper"),
        ("jostle report runs/a -o grid.svg -q 3 -k 8", "a query and its images, or texts"),
    )
)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, and scores in .safetensors files.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Ending in .html, or .png, .svg or .pdf.")
    ],
    query: Annotated[
        list[int] | None, typer.Option("--query", "-q", metavar="I", min=0, help="Which queries. Default: the first 8.")
    ] = None,
    train: Annotated[
        list[int] | None, typer.Option(metavar="J", min=0, help="In a figure: which training examples.")
    ] = None,
    token: Annotated[
        int | None, typer.Option(metavar="S", min=0, help="In a figure: one token of the query, by position.")
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("-k", metavar="K", min=1, help="How many of each. Default: 20 in a page, 6 in a figure."),
    ] = None,
) -> None:
    """Write views of chosen queries into one file: a page that needs no network, or a figure."""
    from jostle.run import Run
    from jostle.viewer.answers import open_sources
    from jostle.viewer.reading import Reading, UnreadableError

    sources = open_sources(runs, Run)
    try:
        if output.suffix == ".html":
            from jostle.viewer.report import write_report

            page = write_report(sources, queries=query, k=k or 20)
            output.write_text(page, encoding="utf-8")
            typer.echo(f"{output}: {len(page) / 1e6:.1f} MB, opens without a network")
            return
        from jostle.viewer.figures import draw_figure

        reading = sources[0].read()
        if not isinstance(reading, Reading):
            raise InputError("report", got="a file of scores", expected="a run directory first")
        draw_figure(reading, output, query=query[0] if query else 0, train=train or [], token=token, k=k or 6)
        typer.echo(str(output))
    except UnreadableError as error:
        raise InputError("report", got=str(error), expected="a run that can be read") from error


def main() -> None:
    """Run the command line."""
    app(prog_name="jostle")
