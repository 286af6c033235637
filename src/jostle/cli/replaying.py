"""`jostle replay`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from jostle.cli.sampling import run
from jostle.cli.shell import app, examples, only_given, say, with_flags_of
from jostle.errors import InputError, require_folder

_TAKEN = ("model", "query", "max_length", "device")
"""What it takes of the flags of a run: the training examples are in the record."""


@app.command(
    "replay",
    epilog=examples(
        (
            "jostle replay a.safetensors --record out/record --model ./base --query q.jsonl",
            "after a training that jostle.training.RecordingCallback has recorded",
        ),
        ("jostle replay a.safetensors ... --check 0", "without trainings beside it: quicker, and nothing is checked"),
        ("jostle top a.safetensors -q 3 --texts t.jsonl", "what shaped query 3, where the first is 0"),
    ),
)
@with_flags_of(run, without=tuple(name for name in inspect.signature(run).parameters if name not in _TAKEN))
def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where effects go; ending in .safetensors.", show_default=False)
    ],
    record: Annotated[Path, typer.Option(metavar="DIR", help="The record of the training.", show_default=False)],
    train: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Its examples, in the Trainer's order, to be listed. Default: its tokens."),
    ] = None,
    check: Annotated[
        int, typer.Option(metavar="N", min=0, help="Train so many times more, without random examples; 0: do not.")
    ] = 20,
    share: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the examples that each of these goes without.")
    ] = 0.02,
    smoothing: Annotated[
        float, typer.Option(metavar="C", min=0, help="Of what Adam divides by, in the derivative alone.")
    ] = 0.1,
    show: Annotated[int, typer.Option(metavar="I", min=0, help="The query of which to list the strongest.")] = 0,
    k: Annotated[int, typer.Option("--k", "-k", metavar="K", min=0, help="How many of each to list.")] = 5,
    **flags: Any,
) -> None:
    """What would each query's loss be without a training example? In nats, from the training itself, done again.

    A recorded training of the Hugging Face Trainer is repeated, and gone through backwards: the exact derivative of the
    query's loss by each example's weight. --model is what was trained: all that did not move has to be as it was.
    Work is written down once a minute; the same command goes on from there.
    """
    from rich.console import Console

    import jostle
    from jostle.asking import requests, tasks
    from jostle.cli.terminal import print_ranking
    from jostle.data.texts import fingerprint, read_records
    from jostle.training.batches import Batches
    from jostle.training.records import dtype_of_record, load_record

    require_folder("file", file)
    given = only_given(flags)
    missing = [f"--{name}" for name in ("model", "query") if name not in given]
    if missing:
        raise InputError("replay", got=f"no {', no '.join(missing)}", expected="--record, --model and --query")
    tasks.require_device(given.get("device"))
    with requests.without_loading_bars():
        task = tasks.language_model(**given, train=None, dtype=dtype_of_record(record))
    if k and show >= len(task.query):  # before there is work that would be lost
        raise InputError("show", got=show, expected=f"an index below {len(task.query)}")
    training = load_record(record, model=task.model)
    assert isinstance(training.data, Batches)
    texts = None if train is None else read_records(train, name="train")
    if texts is not None and len(texts) != len(training.data):
        raise InputError("train", got=f"{len(texts)} examples", expected=f"the record's {len(training.data)}")
    found = jostle.replay(
        training, task.query, smoothing=smoothing, check=check, share=share, out=file, progress=True
    )  # fmt: skip
    about = {**found.provenance, "model": str(given["model"])}
    if texts is not None:  # by which they are known again: jostle top FILE --texts
        about["texts"] = fingerprint(texts)
    scores = found.scores_with(about)
    scores.save(file)
    if k:
        assert task.decode is not None
        shown = [task.decode(tokens) for tokens in training.data.tokens()] if texts is None else [t.text for t in texts]
        print_ranking(
            Console(highlight=False), scores.top(show, k), [{"text": text} for text in shown], task.examples["query"]
        )
    if "repeated" in about:
        say(about["repeated"])
    typer.echo(str(found.check) if found.check is not None else "nothing was checked: --check 20 trains 20 times more")
    typer.echo(f"{file}: {' × '.join(map(str, scores.values.shape))} effects in nats; jostle top {file} -q {show}")
