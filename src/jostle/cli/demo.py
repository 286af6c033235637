"""`jostle demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from jostle.cli.shell import app, examples, finish


@app.command(
    epilog=examples(
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

        finish(images.demonstrate(out or Path("jostle-demo-images"), seed=seed))
    else:
        from jostle.demo import language

        finish(language.demonstrate(out or Path("jostle-demo"), seed=seed))
