"""Commands that show runs in a browser, in a page, or in a figure."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from jostle.cli.reading import read_at
from jostle.cli.shell import Kappa, app, examples, say
from jostle.errors import InputError, require_folder


@app.command(
    epilog=examples(
        ("jostle view runs/a", "opens a page in the browser; while it is sampling, too"),
        ("jostle view runs/a runs/b", "two runs, side by side"),
        ("jostle view runs/a ekfac.safetensors", "beside another method's scores"),
        ("jostle view runs/a --kappa auto", "read at a larger n_beta, as jostle top --kappa auto"),
        ("jostle view runs/a --no-open --port 8000", "through an ssh tunnel"),
    )
)
def view(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories, and scores in .safetensors files.")
    ],
    kappa: Kappa = 0.0,
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
    from jostle.runs.run import Run
    from jostle.viewer.answers import Answers
    from jostle.viewer.sources import open_sources

    answers = Answers(open_sources(runs, Run, kappa))
    try:
        from jostle.viewer.server import serve
    except ImportError as error:
        raise InputError(
            "view",
            got=f"no package {error.name!r}",
            expected="the packages of the extra 'viewer'",
            fix="pip install 'jostle[viewer]'",
        ) from error
    with contextlib.suppress(KeyboardInterrupt):  # which is how it ends
        serve(answers, host=host, port=port, open_browser=open_browser, say=say)


@app.command(
    epilog=examples(
        ("jostle report runs/a -q 3 -q 7", "report.html: a page to open from disk, or to mail"),
        ("jostle report runs/a ekfac.safetensors -o both.html", "two methods"),
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
    ] = Path("report.html"),
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
        typer.Option("--k", "-k", metavar="K", min=1, help="How many of each. Default: 20 in a page, 6 in a figure."),
    ] = None,
    kappa: Kappa = 0.0,
) -> None:
    """Write views of chosen queries into one file: a page that needs no network, or a figure."""
    from jostle.runs.run import Run
    from jostle.viewer.reading import Reading, UnreadableError
    from jostle.viewer.sources import WRITTEN, open_sources

    if output.suffix not in WRITTEN:
        raise InputError("output", got=str(output), expected="a name ending in .html, .png, .svg or .pdf")
    require_folder("output", output)
    if output.suffix != ".html" and len(runs) > 1:
        raise InputError("output", got=f"{output}, a figure, of {len(runs)}", expected="one run", fix="write .html")
    sources = open_sources(runs, Run, kappa)
    try:
        if output.suffix == ".html":
            from jostle.viewer.report import write_report

            page = write_report(sources, queries=query, k=k or 20)
            output.write_text(page, encoding="utf-8")
            typer.echo(f"{output}: {len(page) / 1e6:.1f} MB, opens without a network")
            return
        from jostle.viewer.figures import draw_figure

        reading = sources[0].read()
        assert isinstance(reading, Reading)  # of one source, a run
        draw_figure(reading, output, query=query[0] if query else 0, train=train or [], token=token, k=k or 6)
        typer.echo(f"{output}: {read_at(reading.kappa, chosen=kappa == 'auto')}" if kappa else str(output))
    except UnreadableError as error:
        raise InputError("report", got=str(error), expected="a run that can be read") from error
