"""`jostle evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jostle.cli.shell import app, examples, kappa_of


@app.command(
    epilog=examples(
        ("jostle evaluate banks/a runs/a", "a run beside the controls"),
        ("jostle evaluate banks/a runs/a EK-FAC=a.safetensors", "and saved scores"),
        ("jostle evaluate banks/a runs/a EK-FAC=a.safetensors --against EK-FAC", "and by how much it is better"),
        ("jostle evaluate banks/a runs/a --kappa 10", "also with the training losses held"),
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
        Path | None,
        typer.Option(metavar="FILE", help="Which labels are wrong (.npy of booleans): adds an AUROC of runs."),
    ] = None,
    kappa: Annotated[
        Any,
        typer.Option(
            parser=kappa_of, metavar="K|auto", help="Also read runs at a larger n_beta than was sampled; say 10."
        ),
    ] = 0.0,
    against: Annotated[
        str | None, typer.Option(metavar="METHOD", help="Compare all others with this one, by its name in the table.")
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

    from jostle.cli.terminal import print_report
    from jostle.diagnose import plots
    from jostle.evaluate import Bank, compare
    from jostle.evaluate.report import read_array, read_scores

    if figure is not None:
        plots.check(figure)
    opened = Bank(bank)
    wrong = None if mislabelled is None else read_array(mislabelled)
    read, detections, texts = read_scores(scores or [], wrong, kappa)
    report = compare(
        opened, read, texts=texts, against=against, controls=controls, mislabels=detections,
        bootstrap=bootstrap,
    )  # fmt: skip
    if figure is not None:
        report.draw(figure)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        print_report(Console(highlight=False), report)
