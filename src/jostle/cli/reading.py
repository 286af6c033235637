"""Commands that read a finished run in the terminal, or write its scores."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jostle.cli.shell import Kappa, Normalize, Out, Query, Reduction, app, examples, say
from jostle.errors import EstimateWarning, InputError

if TYPE_CHECKING:
    from jostle.runs.run import Run
    from jostle.scores import Ranking, Scores


def _warn(run: Run) -> None:
    """Say of scores that cannot be relied on that they cannot."""
    from jostle.diagnose import command

    if run.config["keep"] == "traces":
        verdict = run.diagnostics(support=False)["verdict"]
        if verdict["level"] == "unreliable":
            remedy = command(run.config, verdict, run.directory)
            say(f"warning: {verdict['summary']}" + (f": {remedy}" if remedy else ""))


def read_at(kappa: float, *, chosen: bool) -> str:
    """Say at which κ, and whether it was chosen."""
    how = "with the training losses held" if kappa else "as it was sampled"
    support = ", which the draws support" if kappa else ": the draws support no larger one"
    return f"read at κ = {kappa:g}{support if chosen else ''}, {how}"


@app.command(
    epilog=examples(
        ("jostle top runs/a --query 3", "the ten most helpful and most harmful"),
        ("jostle top runs/a -q 3 -k 5 --json", "for a script"),
        ("jostle top a.safetensors -q 3 --texts t.jsonl", "of scores in a file, as first-order writes them"),
    )
)
def top(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The directory of a run, or a .safetensors.", show_default=False)
    ],
    query: Query = 0,
    k: Annotated[int, typer.Option("--k", "-k", metavar="K", min=1, help="How many of each.")] = 10,
    normalize: Normalize = True,
    reduction: Reduction = "mean",
    kappa: Kappa = 0.0,
    standard_error: Annotated[
        bool | None,
        typer.Option("--error/--no-error", help="Show Monte Carlo errors. Default: where there are draws enough."),
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The training texts, for scores in a file. A run knows its own."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; scores keep their sign: negative helps.")
    ] = False,
) -> None:
    """List the training examples that helped and harmed a query most."""
    import json

    from rich.console import Console

    from jostle.cli.terminal import print_ranking
    from jostle.estimate import FEWEST_BATCHES
    from jostle.runs.run import load
    from jostle.scores import Scores

    if out.suffix == ".safetensors" and not out.is_dir():
        if not normalize or reduction != "mean" or kappa or standard_error:
            got, fix = "a file of scores, which are as they were made", "read the run, or make the file anew"
            raise InputError("top", got=got, expected="--query, -k, --texts and --json alone for these", fix=fix)
        scores = Scores.load(out)
        ranking, train = scores.top(query, k), [] if texts is None else _texts(texts, scores)
        if as_json:
            typer.echo(json.dumps(_plain(ranking, train), ensure_ascii=False))
        else:
            print_ranking(Console(highlight=False), ranking, train, [], among=len(scores.values))
            hint = "" if train else "; --texts FILE shows the training texts"
            typer.echo(f"{scores.method}{hint}; jostle view RUN {out} shows them beside a run, with its examples")
        return
    if texts is not None:
        raise InputError("texts", got="a run, which knows its own", expected="scores in a .safetensors file")
    opened = load(out)
    enough = len(opened.healthy_chains) * opened.draws >= FEWEST_BATCHES and opened.config["keep"] == "traces"
    ask = functools.partial(opened.top, k, queries=[query], normalize=normalize, reduction=reduction, kappa=kappa)
    with warnings.catch_warnings():
        if standard_error is None:  # nobody asked for errors: where they rest on little there are none
            warnings.filterwarnings("error", "standard errors rest on", EstimateWarning)
        try:
            [ranking] = ask(standard_error=enough if standard_error is None else standard_error)
        except EstimateWarning:
            if standard_error is not None:
                raise
            [ranking], enough = ask(), False
    train, queries = opened.examples("train"), opened.examples("query")
    _warn(opened)
    if not as_json:
        among = opened.traces.columns("train").samples if opened.config["keep"] == "traces" else None
        print_ranking(Console(highlight=False), ranking, train, queries, among=among)
        if standard_error is None and not enough:
            typer.echo("without errors: there are too few independent draws for them (--error shows what there is)")
        if kappa:
            typer.echo(read_at(ranking.kappa, chosen=kappa == "auto"))
        return
    plain = _plain(ranking, train)
    if kappa:
        plain["kappa"] = ranking.kappa
    typer.echo(json.dumps(plain, ensure_ascii=False))


def _texts(source: str, scores: Scores) -> list[dict[str, str]]:
    """What is shown of training texts that nobody has tokenized."""
    from jostle.data.texts import fingerprint, read_records

    records, expected = read_records(source, name="texts"), "those that were scored, in the same order"
    asked = scores.provenance.get("train")  # of some examples alone
    if asked is not None and len(records) > max(asked):
        records = [records[index] for index in asked]
    if len(records) != len(scores.values):
        raise InputError("texts", got=f"{len(records)} in {source}, not {len(scores.values)}", expected=expected)
    if scores.provenance.get("texts") not in (None, fingerprint(records)):
        raise InputError("texts", got=f"other ones in {source}, or in another order", expected=expected)
    return [{"text": record.text} for record in records]


def _plain(ranking: Ranking, train: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A ranking for a script, with the words of its examples."""
    from jostle.cli.terminal import shown_of

    plain = ranking.to_dict()
    for entry in (*plain["helpful"], *plain["harmful"]):
        if train:
            entry["text"] = shown_of(train[entry["index"]])
    return plain


@app.command(
    epilog=examples(
        ("jostle show runs/a --query 3", "its completion against the three most helpful texts"),
        ("jostle show runs/a -q 3 --train 12 --token 7", "one query token against one text"),
    )
)
def show(
    out: Out,
    query: Query = 0,
    train: Annotated[list[int] | None, typer.Option(metavar="J", min=0, help="Which training texts.")] = None,
    token: Annotated[
        int | None, typer.Option(metavar="S", min=0, help="One token of the query, by position. Default: all of it.")
    ] = None,
    k: Annotated[
        int, typer.Option("--k", "-k", metavar="K", min=1, help="How many training texts, where none is named.")
    ] = 3,
    kappa: Kappa = 0.0,
) -> None:
    """Print a query and training texts, tokens coloured by posterior correlation."""
    from rich.console import Console

    from jostle.cli.terminal import legend, print_strongest, print_tokens
    from jostle.runs.run import load

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
    _warn(opened)
    [ranking] = opened.top(k, queries=[query], normalize=True, kappa=kappa)
    chosen = train or [entry.index for entry in ranking.helpful]
    console = Console(highlight=False)
    marked = [token] if token is not None else scored
    print_tokens(console, f"query {query}", queries[query], marked=marked)
    scores = None
    for index in chosen:
        scores = opened.token_influence(index, query, whole_query=token is None, normalize=True, kappa=kappa)
        column = 0 if token is None else scored.index(token)
        values = scores.posterior_correlation[:, column].tolist()
        correlations = dict(zip(columns["train"].positions_of(index), values, strict=True))
        console.print()
        print_tokens(console, f"train {index}", texts[index], correlations)
        print_strongest(console, texts[index], correlations, 8)
    console.print()
    console.print(legend())
    if kappa and scores is not None:
        typer.echo(read_at(scores.provenance["kappa"], chosen=kappa == "auto"))


@app.command(
    epilog=examples(
        ("jostle export runs/a scores.npy", "the matrix of −correlations, train × query"),
        ("jostle export runs/a scores.parquet --covariance", "−covariances, a row a pair"),
        ("jostle first-order a.safetensors ... --correlation --kappa 0", "what those of runs/a tend to near w*, and"),
        ("jostle export runs/a b.safetensors --toward a.safetensors", "the draws, steadied by it"),
    )
)
def export(
    out: Out,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Ending in .npy, .safetensors, .csv or .parquet.")],
    normalize: Normalize = True,
    reduction: Reduction = "mean",
    kappa: Kappa = 0.0,
    toward: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What jostle first-order wrote: the best mixture with it, by the draws' noise."
        ),
    ] = None,
) -> None:
    """Write the scores, train × query, with the sign that negative helps.

    They are those of [bold]jostle top[/]: −correlations, which are on one scale for all examples, or −covariances
    ([bold]--covariance[/]), which predict how far a query's loss moves.
    """
    from jostle.runs.run import load
    from jostle.scores import Scores

    steady = None if toward is None else Scores.load(toward)
    opened = load(out)
    scores = opened.influence(normalize=normalize, reduction=reduction, kappa=kappa, standard_error=steady is not None)
    if steady is not None:
        kinds, held = ("covariance", "correlation"), scores.provenance["kappa"]
        if (steady.normalized, steady.provenance.get("kappa", 0.0)) != (normalize, held):
            got = f"{kinds[steady.normalized]}s at κ = {steady.provenance.get('kappa', 0.0):g}"
            fix = f"jostle first-order FILE ... --{kinds[normalize]} --kappa {held:g}"
            raise InputError("toward", got=got, expected=f"{kinds[normalize]}s at κ = {held:g}, as these", fix=fix)
        scores = scores.toward(steady)
        about = scores.provenance["toward"]
        a, b = about["weights"].values()
        say(f"{a:.2f} × {toward} + {b:.2f} × draws, of which {about['share_of_noise']:.0%} is noise")
    scores.export(file)
    _warn(opened)
    at = f", {read_at(scores.provenance['kappa'], chosen=kappa == 'auto')}" if kappa else ""
    typer.echo(f"{file}: {'−correlation' if normalize else '−covariance'}{at}, negative = training on it helps")


@app.command(
    epilog=examples(
        ("jostle diagnose runs/a", "a verdict, what to do, and what it rests on"),
        ("jostle diagnose runs/a --plot runs/a.png", "with a picture"),
        ("jostle diagnose runs/a --json", "for a script: .verdict.level is good, doubtful or unreliable"),
    )
)
def diagnose(
    out: Out,
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

    from jostle.cli.terminal import print_diagnostics, print_verdict
    from jostle.diagnose import command
    from jostle.runs.run import load

    opened = load(out)
    found = opened.diagnostics(plot=plot)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    console = Console(highlight=False)
    print_verdict(console, found["verdict"], command(opened.config, found["verdict"], out))
    console.print()
    print_diagnostics(console, found)
