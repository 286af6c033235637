"""Commands that choose hyperparameters: from measurements, or from a grid of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jostle.cli.sampling import KAPPA, RISE, run
from jostle.cli.shell import app, examples, only_given, say, with_flags_of
from jostle.errors import InputError


@app.command(
    epilog=examples(
        (
            "jostle calibrate lm.yaml --model ./model --train t.jsonl --query q.jsonl",
            "then jostle run ... --config lm.yaml",
        ),
        ("jostle calibrate mine.yaml --task my_file.py:build --rise 1", "farther from the checkpoint"),
        ("jostle calibrate mine.yaml --task my_file.py:build --localization 500", "the rest, for this localization"),
    )
)
@with_flags_of(run, without=("out", "auto", "traces", "keep_weights", "dry_run"))
def calibrate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the config goes; ending in .yaml.", show_default=False)
    ],
    rise: Annotated[float | None, typer.Option(metavar="NATS", help=RISE.removeprefix("With --auto: "))] = None,
    kappa: Annotated[float | None, typer.Option(metavar="κ", help=KAPPA.removeprefix("With --auto: "))] = None,
    **flags: Any,
) -> None:
    """Choose hyperparameters from measurements, with a reason for each.

    The localization from how far the mean loss is to rise, n_beta from the
    largest curvature, a step size that is stable for both, and a short pilot.
    Flags that are given are kept. [bold]jostle run OUT --config FILE[/] samples with the result.
    The same command, given again after an interruption, does not measure again what was measured.
    """
    import yaml
    from rich.console import Console

    from jostle.asking import requests
    from jostle.cli.terminal import print_calibration

    if file.suffix not in (".yaml", ".yml"):
        raise InputError("file", got=str(file), expected="the name of a file ending in .yaml")
    elsewhere = {name: flags.pop(name) for name in ("config", "preset")}
    given = only_given(flags)
    request = requests.resolve(given, **elsewhere)
    # Until it is there, for whoever is interrupted.
    measured = file.with_suffix(".measured.json")
    request, chosen, loaded = requests.calibrated(request, given, rise=rise, kappa=kappa, keep=measured, say=say)
    settings = requests.to_config(request, loaded) | {"calibration": chosen.to_dict()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    measured.unlink(missing_ok=True)
    print_calibration(Console(highlight=False), chosen.choices)
    typer.echo(f"{file}: jostle run OUT --config {file}")


_Values = Annotated[str | None, typer.Option(metavar="X,X,...", help="One or more values.")]


@app.command(
    epilog=examples(
        (
            "jostle sweep sweeps/a ... --n-beta 0,10,100 --localization 100,1000",
            "six runs, and sweeps/a/sweep.png",
        ),
        ("jostle sweep sweeps/b ... --bank banks/a", "with the LDS in each cell"),
    )
)
@with_flags_of(run, without=("auto", "rise", "kappa", "traces", "keep_weights", "dry_run"))
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

    from jostle.asking import requests
    from jostle.cli.terminal import print_sweep
    from jostle.diagnose import plots
    from jostle.evaluate import Bank
    from jostle.sweep import AGREEMENT, LDS, draw, rank
    from jostle.sweep import sweep as carry_out

    plots.check("sweep.png")
    texts = {"n_beta": n_beta, "localization": localization, "step_size": step_size, "burn_in": burn_in}
    axes = {name: _numbers(name, text) for name, text in texts.items() if text is not None}
    judge = Bank(bank) if bank is not None else None
    elsewhere = {name: flags.pop(name) for name in ("config", "preset")}
    request = requests.resolve(only_given(flags), **elsewhere)
    cells = carry_out(request, axes, out, bank=judge, jobs=jobs, say=say)
    of = LDS if judge is not None else AGREEMENT
    pictures = draw(cells, out, of=of)
    best_first = sorted(cells, key=rank, reverse=True)
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
