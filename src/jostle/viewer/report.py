"""The same page in one file: some queries, the training examples that matter for them, and every answer beforehand."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from jostle.errors import InputError
from jostle.viewer.answers import STATIC, Answers
from jostle.viewer.places import Layout
from jostle.viewer.reading import SETS, Reading, Table, UnreadableError, finite
from jostle.viewer.sources import Source

MODULE = "data:text/javascript;base64,"

# Nothing may be loaded from anywhere, whatever the texts in the file say.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)

MOST_COMPARED = 5000
"""Training examples beyond which a report leaves the comparison out."""


def write_report(sources: Sequence[Source], *, queries: Sequence[int] | None, k: int, health: bool = True) -> str:
    """Return the page of some queries, each with its ``k`` most helpful and most harmful training examples.

    Raises:
        InputError: a query that is not there, or scores without a run of the same examples.
        UnreadableError: the run cannot be read.
    """
    answers = Answers(sources)
    data: dict[str, Any] = {"start": {}, "answers": {}, "blocks": {}, "images": {}}
    described = answers.runs({})
    assert isinstance(described, dict)
    for number, source in enumerate(sources):
        reading = source.read()
        run = reading if isinstance(reading, Reading) else _run_beside(reading, sources)
        chosen = _chosen(run, queries)
        shown = _shown(sources, run, chosen, k)
        if run is reading:
            _describe(data, number, run, chosen, shown)
            if health:
                _add_diagnostics(data, answers, number)
        _add_blocks(data, number, reading, chosen, shown)
        for other in range(len(sources)):
            if other != number and reading.sizes["train"] <= MOST_COMPARED:
                for query in chosen:
                    asked = {"other": str(other), "query": str(query), "run": str(number)}
                    key = "compare?" + "&".join(f"{name}={value}" for name, value in asked.items())
                    data["answers"][key] = _answer(answers, "compare", asked)
    for run in described["runs"]:
        run["status"] = "complete" if run.get("status") else None
        if not health and run["kind"] != "scores":
            run["has_traces"] = False
    data["answers"]["runs?"] = described
    return _page(data)


def _add_diagnostics(data: dict[str, Any], answers: Answers, number: int) -> None:
    """The health of a run, and its map as it is shown first and in either layout."""
    asked = {"run": str(number)}
    data["answers"][f"health?run={number}"] = _answer(answers, "health", asked)
    data["answers"][f"map?run={number}"] = _answer(answers, "map", asked)
    for layout in get_args(Layout):
        data["answers"][f"map?layout={layout}&run={number}"] = _answer(answers, "map", asked | {"layout": layout})


def _run_beside(scores: Table, sources: Sequence[Source]) -> Reading:
    """The run that shows what a file of scores is about."""
    for source in sources:
        reading = source.read()
        if isinstance(reading, Reading) and reading.sizes == scores.sizes:
            return reading
    raise InputError(
        "report",
        got=f"scores of {scores.sizes['train']} training examples for {scores.sizes['query']} queries",
        expected="a run of the same examples beside them",
    )


def _answer(answers: Answers, question: str, parameters: dict[str, str]) -> Any:
    try:
        return answers.questions[question](parameters)
    except (UnreadableError, InputError) as error:
        return {"refused": str(error)}


def _chosen(reading: Reading, queries: Sequence[int] | None) -> list[int]:
    count = reading.columns("query").samples
    chosen = list(range(min(count, 8))) if queries is None else list(dict.fromkeys(queries))
    for query in chosen:
        reading.sample_of("query", query)
    return chosen


def _shown(sources: Sequence[Source], reading: Reading, chosen: Sequence[int], k: int) -> list[int]:
    """The training examples at either end of any method's ranking for any of these queries."""
    shown: set[int] = set()
    for source in sources:
        other = source.read()
        if other.sizes != reading.sizes:
            continue
        for query in chosen:
            order = np.argsort(-other.correlations("query", query, None)[0], kind="stable")
            shown |= {*order[:k].tolist(), *order[-k:].tolist()}
    return sorted(shown)


def _describe(data: dict[str, Any], number: int, reading: Reading, chosen: Sequence[int], shown: Sequence[int]) -> None:
    for name, kept in zip(SETS, (shown, chosen), strict=True):
        examples = reading.examples[name]
        some = {"examples": finite([examples[index] for index in kept])}
        data["answers"][f"examples?run={number}&set={name}"] = some
        images = reading.images[name]
        if images is not None:
            data["images"][f"{number} {name}"] = {index: _text(images[index].tobytes()) for index in kept}


def _add_blocks(
    data: dict[str, Any], number: int, reading: Reading | Table, chosen: Sequence[int], shown: Sequence[int]
) -> None:
    """For each query: its mean loss and its tokens, against the examples that are shown and their tokens."""
    if isinstance(reading, Table):
        for query in chosen:
            row = reading.correlations("query", query, None)[0][list(shown)]
            data["blocks"][f"{number} {query}"] = _block([row], None, None, [], len(shown))
        return
    columns, of_query = reading.columns("train"), reading.columns("query")
    tokens = [column for index in shown for column in range(*columns.of(index).indices(columns.total))]
    for query in chosen:
        positions = of_query.positions_of(query) if reading.per_token else []
        rows, errors, batches = [], [], None
        for position in (None, *positions):
            span = None if position is None else (position, position)
            by_example, by_token = reading.correlations("query", query, span)
            row, error = [by_example[list(shown)]], [reading.errors("query", query, span, shown, tokens=False)]
            if reading.per_token and by_token is not None:
                row.append(by_token[tokens])
                error.append(reading.errors("query", query, span, tokens, tokens=True))
            rows.append(np.concatenate(row))
            known = [one for one in error if one is not None]
            if len(known) == len(error):
                errors.append(np.concatenate([one[0] for one in known]))
                batches = known[0][1]
        own = None
        if positions:
            series = reading.table("query", tokens=True).centered(of_query.of(query))
            flat = series.reshape(-1, series.shape[2])
            own = flat.T @ flat / max(len(flat) - 1, 1)
        block = _block(rows, errors if len(errors) == len(rows) else None, own, positions, len(shown))
        data["blocks"][f"{number} {query}"] = block | {"batches": batches}


def _block(
    rows: Sequence[np.ndarray],
    errors: Sequence[np.ndarray] | None,
    own: np.ndarray | None,
    positions: Sequence[int],
    examples: int,
) -> dict[str, Any]:
    return {
        "width": len(rows[0]),
        "examples": examples,
        "positions": list(positions),
        "rows": _text(np.concatenate(rows).astype("<f4").tobytes()),
        "errors": None if errors is None else _text(np.concatenate(errors).astype("<f4").tobytes()),
        "own": None if own is None else _text(own.astype("<f4").tobytes()),
        "batches": None,
    }


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _page(data: dict[str, Any]) -> str:
    """The page with its style, its modules and its answers written into it."""
    modules = {
        f"jostle/{path.name}": MODULE + _text(path.read_bytes())
        for path in sorted(STATIC.glob("*.js"))
        if path.name != "app.js"
    }
    # In a script, "</script>" would end it and "<!--" confuse it: no "<" of the data's is left as it is.
    answers = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    parts = {
        r'<link rel="icon".*?>': "",
        r'<link rel="stylesheet".*?>': f"<style>{(STATIC / 'style.css').read_text()}</style>",
        r'<script type="importmap">.*?</script>': (
            f'<script type="importmap">{json.dumps({"imports": modules})}</script>\n'
            f'<script type="application/json" id="jostle-answers">{answers}</script>'
        ),
        r'<script type="module".*?</script>': f'<script type="module">{(STATIC / "app.js").read_text()}</script>',
        r'<meta charset="utf-8">': (
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        ),
    }
    page = (STATIC / "index.html").read_text()
    for pattern, text in parts.items():
        page = re.sub(pattern, lambda _, text=text: text, page, count=1, flags=re.DOTALL)
    return page


class Inline:
    """A page inside a notebook: shown by whatever shows HTML, and kept with the notebook."""

    def __init__(self, page: str, *, height: int) -> None:
        self.page, self._height = page, height

    def _repr_html_(self) -> str:
        # A frame of its own: neither its style nor its scripts meet those of the notebook.
        return (
            f'<iframe title="Jostle" srcdoc="{html.escape(self.page, quote=True)}" width="100%" '
            f'height="{self._height}" style="border: 0" sandbox="allow-scripts"></iframe>'
        )

    def __repr__(self) -> str:
        return "a page of tokens; a notebook shows it"
