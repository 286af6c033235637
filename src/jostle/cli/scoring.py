"""`jostle first-order`."""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jostle.cli.sampling import run
from jostle.cli.shell import app, examples, only_given, say, with_flags_of
from jostle.errors import InputError, require_folder

if TYPE_CHECKING:
    from torch import nn

_TAKEN = ("model", "train", "query", "task", "weights", "max_length", "device")
"""What it takes of the flags of a run: it has no draws."""

_TRAINING = "With --total-rate: "


@app.command(
    "first-order",
    epilog=examples(
        (
            "jostle first-order a.safetensors --model ./model --train t.jsonl --query q.jsonl",
            "scores, and what shaped the first query",
        ),
        (
            "jostle first-order a.safetensors ... --metric adam --weights all --total-rate 0.02 --batch-size 32",
            "for what AdamW would train",
        ),
        (
            "jostle first-order a.safetensors --model ./tuned ... --total-rate 0.02 --start ./base",
            "for what would be trained from ./base",
        ),
        (
            "jostle first-order a.safetensors --model ./checkpoint-250 ... --also ./checkpoint-500",
            "the mean of what two checkpoints say",
        ),
        ("jostle evaluate banks/a a.safetensors", "whether they predict retraining"),
    ),
)
@with_flags_of(run, without=tuple(name for name in inspect.signature(run).parameters if name not in _TAKEN))
def first_order(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where scores go; ending in .safetensors.", show_default=False)
    ],
    metric: Annotated[
        Literal["isotropic", "layers", "adam"],
        typer.Option(
            metavar="NAME",
            help="isotropic: all weights alike; layers: those of any layer; adam: each as far as Adam moves it.",
        ),
    ] = "isotropic",
    labels: Annotated[
        float,
        typer.Option(
            metavar="N", min=0, help="Drawn from the model for every example or token, and held; 0.1: for a tenth."
        ),
    ] = 4,
    kappa: Annotated[
        float | None,
        typer.Option(metavar="κ", help="How far they are held. Default: 100, or with --total-rate, as training says."),
    ] = None,
    total_rate: Annotated[
        float | None,
        typer.Option(metavar="τ", help="The learning rates of all steps of a training, summed: SGD's; adam: Adam's."),
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(metavar="W", help=f"{_TRAINING}the weight decay. Default: 0.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="M", min=1, help=f"{_TRAINING}examples in a step; needed for adam.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT",
            help=f"{_TRAINING}where it begins, if not at the model: an LM, or weights in a .safetensors file.",
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Another checkpoint of the same training: scores are the mean of what all say. As often as you like.",
        ),
    ] = None,
    correlation: Annotated[
        bool, typer.Option("--correlation/--covariance", help="Which of the two scores are.", show_default=True)
    ] = False,
    rounded: Annotated[
        bool | None,
        typer.Option("--rounded/--exact", help="Gradients in bfloat16 or as they are. Default: rounded on a GPU."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the labels.")] = 0,
    show: Annotated[int, typer.Option(metavar="I", min=0, help="The query of which to list the strongest.")] = 0,
    k: Annotated[int, typer.Option("--k", "-k", metavar="K", min=0, help="How many of each to list.")] = 5,
    **flags: Any,
) -> None:
    """Score without a draw: the influence that draws near the checkpoint tend to, from gradients.

    Each training example is scored on each query in closed form, with labels that the model would give held.
    It takes a gradient of every example and of each label. On language models it predicts retraining
    better than draws do, most so with [bold]--weights all[/]; but it knows no tokens, as [bold]jostle run[/] does.
    """
    from rich.console import Console

    from jostle.asking import requests
    from jostle.asking.tasks import other_checkpoint
    from jostle.attributors import FirstOrder
    from jostle.attributors.first_order import damping_of, require_kappa
    from jostle.cli.terminal import print_ranking
    from jostle.data.datasets import Data
    from jostle.data.texts import fingerprint, read_records
    from jostle.scores import Scores

    if file.suffix != ".safetensors":
        raise InputError("file", got=str(file), expected="the name of a file ending in .safetensors")
    for name, value in (("weight_decay", weight_decay), ("batch_size", batch_size), ("start", start)):
        if value is not None and total_rate is None:
            raise InputError(name, got="no --total-rate", expected="--total-rate, which it is for")
    if metric == "adam" and total_rate is not None and batch_size is None:
        expected = "the examples in a step of that training, by whose root Adam's steps are larger"
        raise InputError("batch_size", got="--total-rate without it", expected=expected, fix="add --batch-size")
    if also and start is not None:
        expected = "one of the two: on the way, curvature is counted where the gradients are"
        raise InputError("also", got="--start as well", expected=expected)
    if kappa is not None and total_rate is not None:
        raise InputError("kappa", got="--total-rate as well", expected="one of the two")
    if kappa is not None:
        require_kappa(kappa)
    if total_rate is not None:
        damping_of(total_rate, weight_decay or 0.0)
    if not labels and total_rate is not None:
        raise InputError("labels", got="0 and --total-rate", expected="labels of the model: they show its curvature")
    require_folder("file", file)
    started = time.perf_counter()
    request = requests.resolve(only_given(flags))
    task = requests.task_of(request)
    weights = request.get("weights", task.default_weights)
    device, collate = next(task.model.parameters()).device, task.options.get("collate")
    queries = len(Data(task.query, "query", collate=collate))
    if k and show >= queries:  # before the gradients are taken, not after
        raise InputError("show", got=show, expected=f"an index below {queries}")

    def loaded(name: str, flag: str) -> nn.Module:
        with requests.without_loading_bars():
            return other_checkpoint(task.model, name, flag=flag)

    begun = None if start is None else loaded(start, "start")
    for name in also or ():  # what cannot be taken is refused before there is work that would be lost
        loaded(name, "also")

    def scored(other: str | None) -> Scores:
        """By one checkpoint: its gradients are gone before those of the next one are taken."""
        limit = FirstOrder(
            task.model if other is None else loaded(other, "also"), task.train, task.query, loss=task.loss,
            weights=weights, collate=collate, labels=labels, seed=seed, metric=metric,
            rounded=device.type == "cuda" if rounded is None else rounded, start=begun, progress=True,
        )  # fmt: skip
        at = only_given({"kappa": kappa})
        if total_rate is not None:
            at["kappa"] = limit.kappa_of_training(total_rate, weight_decay=weight_decay or 0.0, batch_size=batch_size)
        found, name = limit.influence(**at, normalize=correlation), other or request.get("model", request.get("task"))
        told = ", as the training says" if total_rate is not None else ""
        say(f"{f'{name}: ' if also else ''}read at κ = {found.provenance['kappa']:.4g}{told}")
        return replace(found, provenance={**found.provenance, "model": str(name)})

    several = [scored(name) for name in (None, *(also or ()))]
    scores = Scores.mean_of(several) if also else several[0]
    about = {**scores.provenance, "seconds": time.perf_counter() - started}
    if "train" in request:  # by which they are known again: jostle top FILE --texts
        about["texts"] = fingerprint(read_records(request["train"], name="train"))
    replace(scores, provenance=about).save(file)
    if k:
        train, query = (task.examples.get(name, []) for name in ("train", "query"))
        print_ranking(Console(highlight=False), scores.top(show, k), train, query, among=len(scores.values))
    typer.echo(f"{file}: {' × '.join(map(str, scores.values.shape))} scores; jostle evaluate BANK {file}")
