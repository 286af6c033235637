"""Results on a terminal: rankings as tables, and texts whose tokens are coloured by correlation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jostle.scores import Entry, Ranking

if TYPE_CHECKING:  # which take seconds to import
    from jostle.calibration import Choice
    from jostle.evaluate.report import Report

HELPFUL, HARMFUL = (31, 119, 180), (217, 95, 2)
"""Blue and orange: a pair that a colour-blind reader can tell apart."""


CONTEXT = 24
"""How much of a text is shown before and after a token that is listed, in characters."""


def print_ranking(
    console: Console,
    ranking: Ranking,
    train: Sequence[Mapping[str, Any]],
    query: Sequence[Mapping[str, Any]],
    *,
    among: int | None = None,
) -> None:
    """Print the most helpful and most harmful examples for a query, out of ``among`` examples."""
    value = "correlation" if ranking.normalized else "influence"
    about = f"query {ranking.query}"
    if query:
        about += f": {excerpt(query[ranking.query], console.width - len(about) - 2)}"
    console.print(Text(about, style="bold"), soft_wrap=True)
    for title, entries in (("most helpful", ranking.helpful), ("most harmful", ranking.harmful)):
        if not entries:
            console.print(f"{title}: none")
            continue
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        cells = [(str(entry.index), _value(entry, ranking)) for entry in entries]
        room = console.width - 8  # what the table's own padding takes
        for column, heading in enumerate(("train", value)):
            widest = max([len(heading), *(len(row[column]) for row in cells)])
            table.add_column(heading, justify="right", no_wrap=True, min_width=widest)
            room -= widest
        if train:
            table.add_column("text", no_wrap=True)
        for entry, row in zip(entries, cells, strict=True):
            table.add_row(*row, *([Text(excerpt(train[entry.index], max(room, 8)))] if train else []))
        console.print(table)
    if ranking.normalized:
        console.print("posterior correlation: positive = the losses move together, training on it helps")
    elif ranking.method in ("solve", "replay"):
        console.print("influence: −0.1 = left out, the query's loss would rise by 0.1 nats; negative = it helped")
    else:
        what = "influence −Cov" if ranking.method == "bif" else "influence"
        console.print(f"{what}: negative = training on it lowers the query's loss")
    known = [(entry.score, entry.standard_error) for entry in (*ranking.helpful, *ranking.harmful)]
    if among and known and known[0][1] is not None:
        # Whoever picks the strongest of many picks the luckiest: an error is not that of a score that was chosen.
        luck = NormalDist().inv_cdf(1 - 1 / (2 * among + 1))
        sure = sum(abs(score) > luck * (error or 0.0) for score, error in known)
        console.print(
            f"of {among:,} scores without any influence the strongest would lie {luck:.1f} errors from 0: "
            f"{sure} of these {len(known)} lie farther"
        )


def _value(entry: Entry, ranking: Ranking) -> str:
    value = -entry.score if ranking.normalized else entry.score
    shown = f"{value:+.3f}" if ranking.normalized else f"{value:+.3e}"
    return shown if entry.standard_error is None else f"{shown} ± {entry.standard_error:.1g}"


def print_calibration(console: Console, choices: Sequence[Choice]) -> None:
    """Print what was chosen for a run, and why."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("because")
    for choice in choices:
        table.add_row(choice.name, choice.value, Text(choice.reason))
    console.print(table)


def print_sweep(console: Console, cells: Sequence[Mapping[str, Any]], of: str) -> None:
    """Print the cells of a sweep, with what went wrong where there are no scores; no number is cut, however narrow."""
    rows = []
    for cell in cells:
        numbers = [f"{value:g}" for value in cell["settings"].values()]
        for name, form in (("value", ".3f"), ("rise", "+.3g"), ("effective_draws", ".0f")):
            numbers.append("" if cell[name] is None else format(cell[name], form))
        # Of a refusal what was refused; sweep.json has all of it.
        remark = (cell["fault"] or cell["verdict"]).removeprefix("refused: ").partition(", expected")[0]
        lost = f"; {cell['failed_chains']} chains failed" if cell["failed_chains"] and cell["value"] is not None else ""
        rows.append((*numbers, remark + lost))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    # In two lines where they are longer than their numbers.
    headings = ("n_beta", "locali-\nzation", "step_\nsize", "burn_\nin", of.replace(" ", "\n", 1), "rise", "ESS")
    for column, heading in enumerate(headings):
        widest = max(map(len, [*heading.splitlines(), *(row[column] for row in rows)]))
        table.add_column(heading, justify="right", no_wrap=True, min_width=widest)
    table.add_column("", min_width=max((len(word) for *_, remark in rows for word in remark.split()), default=0))
    for *numbers, remark in rows:
        table.add_row(*numbers, Text(remark))
    least = console.measure(table, options=console.options.update(width=1000)).minimum
    if least > console.width:
        table.width = least  # the terminal breaks the lines, then
    console.print(table, crop=False)


LEVEL_STYLES = {"good": "bold green", "doubtful": "bold yellow", "unreliable": "bold red"}


def print_verdict(console: Console, verdict: Mapping[str, Any], command: str | None = None) -> None:
    """Print a verdict on a run, and what to do about it: in words, and as a command."""
    console.print(Text(verdict["summary"], style=LEVEL_STYLES[verdict["level"]]), soft_wrap=True)
    for reason in verdict["reasons"]:
        if reason["finding"] in verdict["summary"]:
            continue
        console.print(Text(f"  {reason['level']}: {reason['finding']}; {reason['advice']}"), soft_wrap=True)
    if command is not None:
        console.print(f"to follow it: {command}", markup=False, soft_wrap=True)
    if verdict["hint"] is not None:
        console.print(f"hint: {verdict['hint']}", markup=False, soft_wrap=True)


def print_summary(console: Console, found: Mapping[str, Any], directory: str, command: str | None = None) -> None:
    """Print a run's diagnostics in a few lines: the verdict, the numbers that matter most, and where there are more."""
    print_verdict(console, found["verdict"], command)
    short = ("chains × draws", "mean loss", "effective draws")
    numbers = "; ".join(f"{name} {value}" for name, value in _diagnostic_rows(found) if name in short)
    console.print(numbers, markup=False, soft_wrap=True)
    console.print(f"more: jostle diagnose {directory}", markup=False, soft_wrap=True)


def print_diagnostics(console: Console, found: Mapping[str, Any]) -> None:
    """Print what a verdict rests on."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _diagnostic_rows(found):
        table.add_row(name, value)
    console.print(table)


def _diagnostic_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    failed = ", ".join(f"chain {one['chain']} at step {one['step']}" for one in found["failed_chains"])
    yield "chains × draws", f"{found['chains']} × {found['draws']}" + (f"; failed: {failed}" if failed else "")
    if "rise" in found:
        center = found["mean_loss_at_center"]
        at = "" if center is None else f"{found['mean_loss']:.4g} over the draws, {center:.4g} at w*: "
        yield "mean loss", f"{at}{found['rise']:+.3g} nats"
        coefficient = found["local_learning_coefficient"]
        if coefficient["value"] is not None:
            error = "" if coefficient["standard_error"] is None else f" ± {coefficient['standard_error']:.2g}"
            yield "learning coefficient", f"{coefficient['value']:.4g}{error} (of {coefficient['of']})"
    if found.get("temperature", {}).get("value") is not None:
        heat = found["temperature"]
        error = "" if heat["standard_error"] is None else f" ± {heat['standard_error']:.1g}"
        yield "temperature", f"{heat['value']:.3g}{error}, where 1 is that of the target"
    if found.get("effective_draws") is not None:
        number = f"{found['effective_draws']:.0f} for scores (3 in 4 have as many)"
        yield "effective draws", f"{number}; {found['autocorrelation_time']:.1f} draws for each"
    for name, title in (
        ("losses", "losses"),
        ("products", "products of losses"),
        ("tokens", "losses of tokens"),
        ("token_products", "products of tokens"),
    ):
        if name in found and found[name]["r_hat"] is not None:
            numbers = found[name]
            yield (
                title,
                f"R-hat {numbers['r_hat']:.3f} (worst {numbers['r_hat_max']:.3f}), ESS bulk {numbers['ess_bulk']:.0f}"
                f" (worst {numbers['ess_bulk_min']:.0f}), tail {numbers['ess_tail']:.0f}",
            )
    if found.get("drift", {}).get("standard_errors") is not None:
        moved = found["drift"]
        yield "drift of the mean loss", f"{moved['change']:+.2g} nats, {moved['standard_errors']:+.1f} standard errors"
    if found.get("between_chain_share") is not None:
        yield "variance between chains", f"{found['between_chain_share']:.2%}"
    for name, title in (("halves", "halves of draws"), ("chains", "halves of chains")):
        both = found.get("agreement", {}).get(name, {})
        if both.get("spearman") is not None:
            top = f"{both['top_overlap']:.0%} of the {found['agreement']['top']} most helpful in common, "
            top += f"{both['harmful_overlap']:.0%} of the most harmful"
            yield f"scores, {title}", f"Spearman {both['spearman']:.2f}, {top}"
    if found.get("kappa_support"):
        from jostle.conditioning import LEAST_SUPPORT

        each = ", ".join(f"{kappa}: {value:.2f}" for kappa, value in found["kappa_support"].items())
        yield "support of κ", f"{each} ({LEAST_SUPPORT:g} or more is enough); --kappa auto reads at {found['kappa']:g}"
    for remark in found["remarks"]:
        yield "remark", remark


def print_report(console: Console, report: Report) -> None:
    """Print methods and controls on a bank, with 95 % intervals."""
    from jostle.evaluate.metrics import CONTROL_MARK  # which takes seconds

    for line in report.about:
        console.print(Text(line), soft_wrap=True)
    for (first, *headings), *rows in report.tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(first, overflow="fold")  # in a narrow window: no digit may be cut off
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for cells in rows:
            table.add_row(*map(Text, cells), style="dim" if cells[0].endswith(CONTROL_MARK) else None)
        console.print(table)
    for line in report.notes:
        console.print(line, soft_wrap=True)


def shown_of(example: Mapping[str, Any]) -> str | None:
    """Return what stands for an example in words: its text or, without one, its label."""
    words = next((example[name] for name in ("text", "label") if example.get(name) is not None), None)
    return None if words is None else str(words)


def excerpt(example: Mapping[str, Any], width: int) -> str:
    """Return the beginning of an example's text, on one line of this width."""
    text = " ".join((shown_of(example) or "").split())
    return text if len(text) <= width else text[: width - 1] + "…"


def print_tokens(
    console: Console,
    title: str,
    example: Mapping[str, Any],
    correlations: Mapping[int, float] | None = None,
    *,
    marked: Sequence[int] = (),
) -> None:
    """Print a text with its tokens on a background of their correlation; ``marked`` tokens are underlined."""
    largest = max((abs(value) for value in (correlations or {}).values()), default=1.0) or 1.0
    text = Text()
    for position, token in enumerate(example["tokens"]):
        style = "underline bold" if position in marked else ""
        if correlations is None or position not in correlations:
            style += " dim" if correlations is not None else ""
        else:
            style += f" on {_colour(correlations[position] / largest)} black"
        text.append(token, style=style.strip())
    console.print(Text(title, style="bold"))
    console.print(text, soft_wrap=False)


def print_strongest(
    console: Console, example: Mapping[str, Any], correlations: Mapping[int, float], count: int
) -> None:
    """List the tokens with the largest correlations among their neighbours: a dot or a space alone says nothing."""
    shown = [position for position, value in correlations.items() if abs(value) >= 0.005]  # the others would be 0.00
    order = sorted(shown, key=lambda position: -abs(correlations[position]))[:count]
    tokens = example["tokens"]

    def quoted(start: int, end: int) -> str:
        return repr("".join(tokens[start:end]))[1:-1]  # line breaks as they are written

    console.print(Text("strongest:", style="dim"))
    for position in order:
        before, after = quoted(0, position)[-CONTEXT:], quoted(position + 1, len(tokens))[:CONTEXT]
        itself = (f"[{quoted(position, position + 1)}]", "bold")
        line = Text.assemble(f"{correlations[position]:+.2f}  {before:>{CONTEXT}}", itself, after)
        console.print(line, style="dim", no_wrap=True, overflow="ellipsis")


def legend() -> Text:
    """Return what the colours mean."""
    return Text.assemble(
        ("  helps  ", f"on {_colour(1.0)} black"),
        " losses move together (posterior correlation > 0)   ",
        ("  harms  ", f"on {_colour(-1.0)} black"),
        " they move against each other",
    )


def _colour(value: float) -> str:
    """White at 0, the colour of its sign at ±1."""
    target = np.array(HELPFUL if value > 0 else HARMFUL)
    red, green, blue = (255 + (target - 255) * min(1.0, abs(value)) * 0.8).astype(int)
    return f"rgb({red},{green},{blue})"
