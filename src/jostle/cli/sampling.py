"""Commands that sample, and `jostle check`, which says whether what they wrote is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jostle.cli.shell import ExitCode, Out, app, examples, finish, in_panels, only_given, say
from jostle.errors import InputError
from jostle.presets import CALIBRATED, DEFAULTS, LANGUAGE_WEIGHTS, PRESETS
from jostle.presets import KAPPA as USUAL_KAPPA
from jostle.presets import RISE as USUAL_RISE

_Shards = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Spread each model over N ranks of torchrun (FSDP2). Default: 1.")
]
RISE = f"With --auto: how far, in mean loss over the checkpoint's, influence is read. Default: {USUAL_RISE:g}."
KAPPA = (
    "With --auto: curvature of the losses over localization; 0 is the control without a gradient. "
    f"Default: {USUAL_KAPPA:g}."
)


def _setting(name: str, metavar: str, about: str) -> Any:
    """An option, with what it is where nobody gives it, and who else may decide that."""
    value = DEFAULTS[name]
    others = ["the --preset's"] if any(name in preset for preset in PRESETS.values()) else []
    others += ["calibrated"] if name in CALIBRATED else []
    default = " or ".join([value if isinstance(value, str) else f"{value:g}", *others])
    return typer.Option(metavar=metavar, help=f"{about} Default: {default}.")


_NOT_SETTINGS = ("out", "config", "preset", "auto", "rise", "kappa", "dry_run")


@app.command(
    epilog=examples(
        ("jostle run runs/a --model ./model --train train.jsonl --query query.jsonl", "attention moves"),
        ("jostle run runs/b ... --preset scaling", "as in the paper"),
        ("jostle run runs/c --task my_file.py:build --weights all", "a model of your own"),
        ("jostle run runs/d --config runs/a/config.yaml", "the same again"),
        ("jostle run runs/e ... --dry-run", "what it will take: memory, disk, time"),
        ("jostle run runs/e ... --until ess=400 --draws 2000 --minutes 30", "as long as it takes, or half an hour"),
        ("jostle run runs/f --task my_file.py:build --auto", "hyperparameters from measurements"),
        ("torchrun --nproc-per-node 8 -m jostle run runs/g ...", "chains on 8 GPUs"),
        ("jostle run runs/h ... --traces s3://bucket/runs/h", "traces in an object store, the rest in runs/h"),
    )
)
@in_panels(
    {
        "What": ("model", "train", "query", "sampling", "task", "weights", "max_length", "config"),
        "How many draws": ("chains", "draws", "burn_in", "thin", "until", "minutes", "seed"),
        "Which draws": (
            "preset", "auto", "rise", "kappa", "sampler", "step_size", "friction", "n_beta", "localization",
            "batch_size",
        ),
        "Switches": ("control_variates", "antithetic", "compile"),
        "Where": ("device", "precision", "shards", "traces", "keep_weights", "dry_run"),
    }
)  # fmt: skip
def run(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the run goes.", show_default=False)],
    model: Annotated[str | None, typer.Option(metavar="DIR|ID", help="A causal LM: a directory or a hub id.")] = None,
    train: Annotated[str | None, typer.Option(metavar="FILE", help="Training texts to score.")] = None,
    query: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Texts or prompt-completion pairs; of several files, too.")
    ] = None,
    sampling: Annotated[
        str | None, typer.Option(metavar="FILE", help="What minibatches are drawn from. Default: the training texts.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:NAME", help="A task of your own, instead: a function, build by default."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The config.yaml of a run, to repeat it, or what jostle calibrate wrote."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Hyperparameters of the paper's experiments: {', '.join(PRESETS)}."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose what is not given from measurements (see jostle calibrate).")
    ] = False,
    rise: Annotated[float | None, typer.Option(metavar="NATS", help=RISE)] = None,
    kappa: Annotated[float | None, typer.Option(metavar="κ", help=KAPPA)] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP|GLOB",
            help=f"Which weights move. Default: {LANGUAGE_WEIGHTS} of an LM, all of an adapter or a task.",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        _setting(
            "sampler",
            "NAME",
            "sgld, rmsprop, rmsprop-devinterp, leimkuhler-matthews, ornstein-uhlenbeck, baoab, sgnht or gaussian "
            "(no gradient: the control).",
        ),
    ] = None,
    step_size: Annotated[float | None, _setting("step_size", "ε", "The size of a step.")] = None,
    friction: Annotated[
        float | None, typer.Option(metavar="Γ", help="Of baoab and sgnht. Default: 1, critical.")
    ] = None,
    n_beta: Annotated[float | None, _setting("n_beta", "nβ", "Effective number of samples.")] = None,
    localization: Annotated[float | None, _setting("localization", "γ", "Pull towards the checkpoint.")] = None,
    chains: Annotated[int | None, _setting("chains", "C", "Number of chains.")] = None,
    draws: Annotated[
        int | None,
        _setting("draws", "T", "Draws from each chain; with --until or --minutes, at most."),
    ] = None,
    until: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ess=N|error=E",
            help="Stop at so many effective draws (what 19 in 20 losses have; the verdict counts what 3 in 4 have), or "
            "so small a standard error of each query's top scores; given twice, at both. none: not that of --config.",
        ),
    ] = None,
    minutes: Annotated[
        str | None, typer.Option(metavar="MIN|none", help="Stop when they are over. none: not those of --config.")
    ] = None,
    burn_in: Annotated[int | None, _setting("burn_in", "B", "Steps before the first draw.")] = None,
    thin: Annotated[
        str | None,
        _setting("thin", "K|auto", "Steps between draws; auto: for the most effective draws a second."),
    ] = None,
    batch_size: Annotated[int | None, _setting("batch_size", "M", "Examples in a minibatch.")] = None,
    control_variates: Annotated[
        bool | None,
        typer.Option(
            "--control-variates/--no-control-variates",
            help="Less minibatch noise, for two gradients a step. Default: off.",
        ),
    ] = None,
    antithetic: Annotated[
        bool | None,
        typer.Option("--antithetic/--no-antithetic", help="Chains in pairs with opposite noise. Default: off."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(metavar="N", help="Cut sequences after N tokens. Default: the model's context.")
    ] = None,
    precision: Annotated[
        Literal["model", "bfloat16", "float8", "float8-emulated"] | None,
        typer.Option(
            metavar="KIND",
            help="Of matrix products: the model's own, the default (model); bfloat16, which GPUs are fast in; float8, "
            "which observes faster yet; float8-emulated.",
        ),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile. Default: on a GPU, for long runs.")
    ] = None,
    seed: Annotated[int | None, _setting("seed", "N", "The only source of randomness.")] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="cuda, cpu, ... Default: a GPU if any.")] = None,
    shards: _Shards = None,
    traces: Annotated[
        str | None, typer.Option(metavar="URL", help="A store for the traces, instead of OUT: s3://bucket/prefix.")
    ] = None,
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights", help="Keep the weights of every draw: quicker to add queries to.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what it will take, after a few timed steps, and with --auto a calibration; write nothing.",
        ),
    ] = False,
) -> None:
    r"""Sample around a checkpoint and record every token's loss.

    Texts are JSONL ([bold]text[/], or [bold]prompt[/] and [bold]completion[/], or chat [bold]messages[/]), plain text
    with an example a line, CSV, Parquet, or a Hugging Face data set ([bold]DIR:train\[:400][/]).
    The same command, given again, goes on where it was interrupted, to as many draws as it was asked for;
    with larger [bold]--draws[/] or [bold]--chains[/], or one more [bold]--query[/], it adds to what is there.
    """
    given = only_given({name: value for name, value in locals().items() if name not in _NOT_SETTINGS})
    from jostle import ranks
    from jostle.asking import requests
    from jostle.runs.layout import CALIBRATION, place_for

    ranks.join()
    if not auto and (rise is not None or kappa is not None):
        raise InputError("rise" if rise is not None else "kappa", got="no --auto", expected="--auto, which it is for")
    if auto and (shards or 1) > 1:
        raise InputError("shards", got="--auto", expected="the config of jostle calibrate", fix="--config FILE")
    # A run that was begun goes on with what was chosen then.
    begun = auto and (out / "manifest.json").is_file()
    if begun:
        given = requests.given_again(out, given, config=config, rise=rise, kappa=kappa)
        config = out / "config.yaml"
    request = requests.resolve(given, config=config, preset=preset, out=out)
    loaded = None

    def calibrated() -> dict[str, Any]:
        nonlocal loaded
        keep = None if dry_run else out / CALIBRATION
        chosen, _, loaded = requests.calibrated(request, given, rise=rise, kappa=kappa, keep=keep, say=say)
        return chosen

    if auto and not begun:
        place_for(out, traces)  # a place that cannot hold the run is refused before minutes are spent
        with ranks.Ranks() as group:
            request = group.share(calibrated)
    _carry_out(request, out, task=loaded, dry_run=dry_run)


@app.command(
    epilog=examples(
        ("jostle resume runs/a", "after Ctrl-C, a crash, a full disk, or a preempted job (exit code 75)"),
        ("jostle resume runs/a --device cpu", "elsewhere; the model must come to the same numbers there"),
    )
)
def resume(
    out: Out,
    device: Annotated[str | None, typer.Option(metavar="NAME", help="Default: where the run began.")] = None,
    shards: _Shards = None,
) -> None:
    """Go on with a run that was interrupted, to the same numbers as if it had not been.

    Model, data and settings are those of its [bold]config.yaml[/]. A finished run is only read.
    """
    from jostle import ranks
    from jostle.asking import requests

    ranks.join()
    _carry_out(requests.of_run(out, only_given({"device": device, "shards": shards})), out)


@app.command(
    epilog=examples(
        ("jostle extend runs/a --draws 400", "400 draws of each chain in all; those that are there stay"),
        ("jostle extend runs/a --chains 8", "8 chains in all"),
        ("jostle extend runs/a --query more.jsonl", "more queries, at the draws that are there"),
    )
)
def extend(
    out: Out,
    draws: Annotated[int | None, typer.Option(metavar="T", min=1, help="Draws of each chain, in all.")] = None,
    chains: Annotated[int | None, typer.Option(metavar="C", min=1, help="Chains, in all.")] = None,
    query: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Queries, after those that are there.")
    ] = None,
    shards: _Shards = None,
) -> None:
    """Add draws, chains or queries to a run, to the same numbers as if it had had them from the start.

    New queries are observed at the weights that [bold]jostle run --keep-weights[/] kept or, without them,
    while the chains walk again from the checkpoint; nothing that is recorded is observed again.
    If it is interrupted, [bold]jostle resume[/] goes on.
    """
    from jostle import ranks
    from jostle.asking import requests

    ranks.join()
    if draws is None and chains is None and not query:
        raise InputError("extend", got="neither --draws nor --chains nor --query", expected="one of them")
    changes = only_given({"draws": draws, "chains": chains, "query": query or None, "shards": shards})
    _carry_out(requests.of_run(out, changes), out)


@app.command(
    epilog=examples(
        ("jostle check runs/a", "one line for each finding; exit code 0 where all is well"),
        ("jostle check runs/a && jostle top runs/a", "for a script: 4 damaged, 75 unfinished, 3 a chain failed"),
    )
)
def check(out: Out) -> None:
    """Read every byte of a run, and say what is damaged, missing or unfinished.

    Fingerprints, checksums, shapes, finite values and status. Model and data are
    not looked at: [bold]jostle resume[/] compares those.
    """
    from jostle.runs.integrity import examine

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
    from jostle import ranks
    from jostle.asking import requests

    def say_once(message: str) -> None:
        if ranks.leads():
            say(message)

    def show_plan(lines: list[str]) -> None:
        if ranks.leads():
            typer.echo("\n".join(lines))
        raise typer.Exit

    finished = requests.carry_out(request, out, say=say_once, task=task, dry_run=show_plan if dry_run else None)
    if not ranks.leads():
        return
    from rich.console import Console

    from jostle.cli.terminal import print_summary
    from jostle.diagnose import command

    found = finished.diagnostics(support=False)
    print_summary(Console(highlight=False), found, str(out), command(finished.config, found["verdict"], out))
    if finished.stopped:
        say(finished.stopped)
    finish(finished)
