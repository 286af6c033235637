"""`jostle solve`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jostle.cli.sampling import run
from jostle.cli.shell import ExitCode, app, examples, only_given, say, with_flags_of
from jostle.errors import InputError, require_folder

if TYPE_CHECKING:
    from torch import nn

    from jostle.training import MomentComparison, Training

_TAKEN = ("model", "train", "query", "task", "max_length", "device")
"""What it takes of the flags of a run: it has no draws."""

_NUMBERS = "Training in numbers"
_FROM = "Training from files"


@app.command(
    "solve",
    epilog=examples(
        (
            "jostle solve a.safetensors --model out/checkpoint-1500 --train t.jsonl --query q.jsonl --examples 12000",
            "after the Hugging Face Trainer",
        ),
        (
            "jostle solve a.safetensors --model ./tuned ... --optimizer adamw --total-rate 0.02 --batch-size 32",
            "where only the numbers are left",
        ),
        ("jostle top a.safetensors -q 3 --texts t.jsonl", "what shaped query 3, where the first is 0"),
        ("jostle evaluate banks/a a.safetensors", "whether it predicts retraining"),
    ),
)
@with_flags_of(run, without=tuple(name for name in inspect.signature(run).parameters if name not in _TAKEN))
def solve(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where effects go; ending in .safetensors.", show_default=False)
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A checkpoint of the Trainer, with its optimizer. Default: --model, where it is one.",
            rich_help_panel=_FROM,
        ),
    ] = None,
    trained_on: Annotated[
        int | None,
        typer.Option(
            "--examples",
            metavar="N",
            min=1,
            help="How many were trained on: gives the batch size.",
            rich_help_panel=_FROM,
        ),
    ] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(
            metavar="C", min=0, help="To which the Trainer clipped; 0: not. Default: 1.", rich_help_panel=_FROM
        ),
    ] = None,
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"] | None,
        typer.Option(help="With which it was trained.", rich_help_panel=_NUMBERS),
    ] = None,
    total_rate: Annotated[
        float | None,
        typer.Option(metavar="τ", help="The learning rates of all steps, summed.", rich_help_panel=_NUMBERS),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(metavar="W", help="Default: 0.", rich_help_panel=_NUMBERS)
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(metavar="M", help="Of SGD. Default: 0.", rich_help_panel=_NUMBERS)
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="M", min=1, help="Examples in an optimizer step; of Adam.", rich_help_panel=_NUMBERS),
    ] = None,
    clip_factor: Annotated[
        float | None,
        typer.Option(metavar="C", help="The mean of min(1, max norm / norm). Default: 1.", rich_help_panel=_NUMBERS),
    ] = None,
    estimate_moments: Annotated[
        bool,
        typer.Option(
            "--estimate-moments",
            help="Estimate Adam's second moments at the checkpoint, in place of the optimizer's own.",
            rich_help_panel=_FROM,
        ),
    ] = False,
    count_alike: Annotated[
        Literal["tokens", "sequences"], typer.Option(help="Whose losses had the same weight in training.")
    ] = "tokens",
    total: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Where --train is only a part: how many tokens all of training had, or sequences with --count-alike.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="GROUP|GLOB", help="Which of the weights that moved. Default: all that were trained."),
    ] = None,
    within: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="How large a typical query's error may be, beside the spread of its effects."
        ),
    ] = 0.2,
    runs: Annotated[int, typer.Option(metavar="N", min=2, help="The most backward runs to average.")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what is drawn.")] = 0,
    show: Annotated[int, typer.Option(metavar="I", min=0, help="The query of which to list the strongest.")] = 0,
    k: Annotated[int, typer.Option("--k", "-k", metavar="K", min=0, help="How many of each to list.")] = 5,
    **flags: Any,
) -> None:
    """What would each query's loss be without a training example? In nats, from how the model was trained.

    It needs no draws and no retraining: the optimizer, its learning rates and its weight decay say how far training
    would have gone elsewhere. They are read from a checkpoint of the Trainer, or given as numbers.
    Exits with 3 where a query is not solved; the file then says which.
    """
    from rich.console import Console

    import jostle
    from jostle.asking import requests
    from jostle.cli.terminal import print_ranking
    from jostle.data.datasets import Data
    from jostle.data.texts import fingerprint, read_records

    if file.suffix != ".safetensors":
        raise InputError("file", got=str(file), expected="the name of a file ending in .safetensors")
    numbers = only_given(
        {
            "optimizer": optimizer, "total_rate": total_rate, "weight_decay": weight_decay, "momentum": momentum,
            "batch_size": batch_size, "clip_factor": clip_factor,
        }
    )  # fmt: skip
    require_folder("file", file)
    request = requests.resolve(only_given(flags))
    task = requests.task_of(request)
    collate = task.options.get("collate")
    queries, given = (len(Data(getattr(task, name), name, collate=collate)) for name in ("query", "train"))
    if k and show >= queries:  # before there is work that would be lost
        raise InputError("show", got=show, expected=f"an index below {queries}")
    if trained_on is not None and given < trained_on and total is None:
        raise InputError(
            "train",
            got=f"{given} of the {trained_on} examples",
            expected="all of them, or --total with how many tokens (sequences, with --count-alike sequences) they have",
        )
    place = checkpoint or (_own_checkpoint(request.get("model")) if optimizer is None else None)
    alike = {"count_alike": count_alike, "total": total}
    if optimizer is not None and (checkpoint, trained_on, max_grad_norm) != (None, None, None):
        got = "--optimizer beside --checkpoint, --examples or --max-grad-norm"
        raise InputError("training", got=got, expected="numbers, or files")
    training = _training(place, task.model, numbers, alike, trained_on, max_grad_norm)
    if estimate_moments:
        training = dataclasses.replace(training, second_moments=None)
    say(str(training))
    solution = jostle.solve(
        task.model, task.train, task.query, training=training, loss=task.loss, collate=collate,
        weights=weights, within=within, runs=runs, seed=seed, progress=True,
    )  # fmt: skip
    if solution.moments:
        say(_told(solution.moments))
    about = {**solution.provenance, "model": str(request.get("model", request.get("task")))}
    if "train" in request:  # by which they are known again: jostle top FILE --texts
        about["texts"] = fingerprint(read_records(request["train"], name="train"))
    scores = solution.scores_with(about)
    scores.save(file)
    if k:
        train, query = (task.examples.get(name, []) for name in ("train", "query"))
        print_ranking(Console(highlight=False), scores.top(show, k), train, query)
        error = solution.errors[show]
        none = "chance leaves no error in them; what the theory leaves out is another matter (docs/solve.md)"
        typer.echo(f"what chance leaves as their error is {error:.1g} nats" if error else none)
    typer.echo(f"{file}: {' × '.join(map(str, scores.values.shape))} effects in nats; jostle top {file} -q {show}")
    if not solution.solved.all():
        raise typer.Exit(ExitCode.CHAIN_FAILED)


def _own_checkpoint(model: Any) -> Path | None:
    """The model's directory, where it is a checkpoint with its optimizer."""
    if model is None:
        return None
    if (Path(model) / "trainer_state.json").is_file() and not (Path(model) / "optimizer.pt").is_file():
        raise InputError(
            "model", got=f"{model}, a checkpoint of the Trainer without its optimizer.pt", expected="one with it",
            fix="save with save_only_model=False, or say how it was trained: --optimizer adamw --total-rate ... "
            "--batch-size ...",
        )  # fmt: skip
    return Path(model) if (Path(model) / "optimizer.pt").is_file() else None


def _training(
    place: Path | None,
    model: nn.Module,
    numbers: dict[str, Any],
    alike: dict[str, Any],
    examples: int | None,
    max_grad_norm: float | None,
) -> Training:
    """From files, unless there are only numbers; of those that both have, the given ones."""
    from jostle.training import Training

    if "optimizer" in numbers:
        return Training(**{**numbers, **alike})
    if place is None:
        raise InputError(
            "training",
            got="nothing that says how the model was trained",
            expected="a checkpoint of the Trainer with its optimizer.pt, or numbers",
            fix="add --checkpoint out/checkpoint-1500, or --optimizer adamw --total-rate 0.02 --batch-size 32 "
            "(jostle run needs neither)",
        )
    strange = sorted(set(numbers) & {"weight_decay", "momentum"})
    if strange:
        raise InputError(strange[0], got="it beside a checkpoint, which knows it", expected="it with --optimizer")
    clipped = 1.0 if max_grad_norm is None else max_grad_norm
    return Training.from_checkpoint(place, model, examples=examples, max_grad_norm=clipped, **numbers, **alike)


def _told(moments: list[MomentComparison]) -> str:
    """How the optimizer's second moments compare with those at the checkpoint, over all, and where they are worst."""
    whole = moments[-1]
    tensors = [row for row in moments[:-1] if math.isfinite(row.rank_correlation)]
    worst = min(tensors, key=lambda row: row.rank_correlation, default=whole)
    return (
        f"second moments: roots {whole.ratio:.2g} times those of gradients at the checkpoint, rank correlation "
        f"{whole.rank_correlation:.2f}; lowest in {worst.name}, {worst.rank_correlation:.2f}"
    )
