"""Does the per-token BIF find a word's translation?

    python -m experiments.word_alignment --english train.en --french train.fr --work DIR

A language model learns the sentence pairs of Multi30k in both orders, so that either language predicts the other. Then
some of its weights are jostled, and the losses of all words are recorded, in pairs that were trained on and in pairs
that were held out. How much a word of one language has to do with a word of the other is the mean posterior correlation
of the tokens of the one in the trained pairs with the tokens of the other in the held-out pairs, and the other way
round: no two of these tokens share a sentence. That makes a table of English × French words, and so do gradient
cosines, co-occurrence and embeddings. Two questions are asked of every table:

- **Lexicon.** A word is given; is the first of all words of the other language a translation of it?
- **Alignment.** A word of an observed pair is given; is the first word of its other sentence a translation?

Precision at 1 and mean reciprocal rank, ties counted against, of a table as it is and *centered* (less the means of its
rows and columns, since some words move with everything). Errors are bootstrapped over words. Half of the words are for
choosing settings, and the other half for reporting. What is right comes from the whole corpus: IBM model 1 both ways,
content words, confident entries alone. Candidates are all words that both observed sets hold often enough, function
words included, but for identical strings.

A setting is WEIGHTS@RISE or WEIGHTS@RISE@no-gradient: which weights move, and by how many nats Gaussian perturbations
of them raise the mean loss; without a gradient, n_beta = 0. The defaults are for a GPU; on one CPU core:

    --words 450 --longest 26 --hidden 96 --layers 2 --epochs 10 --batch-size 32 --held-out 300 --pairs 80 --minutes 28

Text files may be compressed by xz. Model and tables are kept in --work, and a second call goes on with what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.environment import write_record
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_array
from torch import nn

import jostle
from experiments.parallel_text import LONGEST_PAIR, Corpus, Table, build_dictionary, cooccurrence
from experiments.translation_model import build_model, padded, train_model
from jostle.calibration import LONGEST_PULL
from jostle.demo.language import one_core
from jostle.estimate import covariance
from jostle.losses import IGNORED_LABEL
from jostle.models.weights import MovingWeights

RECORD = Path(__file__).parent / "records" / "word_alignment.json"
SETS = ("train", "query")
HALVES = ("for choosing", "for reporting")
TASKS = ("lexicon", "alignment")
SETTINGS = ("embedding@1", "embedding@1@no-gradient", "embedding@0.3", "attention@1")
KAPPA = 0.1
"""n_beta · curvature / localization: small enough that Ornstein–Uhlenbeck steps of 4/localization are right, and with
them every draw is nearly independent of the last."""


def say(*words: object) -> None:
    print(*words, flush=True)


# ----------------------------------------------------------------------------------------------------------- questions


def choose(corpus: Corpus, pairs: Sequence[int], dictionary: Table, count: int) -> list[int]:
    """Short pairs in which all words of the dictionary occur about equally often, one after another."""
    wanted = [set(np.flatnonzero(dictionary.any(1)).tolist()), set(np.flatnonzero(dictionary.any(0)).tolist())]
    held = {
        pair: [(language, word) for language in (0, 1) for word in set(corpus.pairs[pair][language]) & wanted[language]]
        for pair in pairs
    }
    length = {pair: sum(map(len, corpus.pairs[pair])) for pair in pairs}
    seen: Counter[tuple[int, int]] = Counter()
    chosen = []
    for _ in range(min(count, len(pairs))):
        best = max(held, key=lambda pair: sum(2.0 ** -seen[key] for key in held[pair]) / length[pair])
        seen.update(held.pop(best))
        chosen.append(best)
    return chosen


class Observed:
    """The pairs that are observed in both orders, what is scored of them, and the words that are asked for."""

    def __init__(self, corpus: Corpus, pairs: Mapping[str, Sequence[int]], dictionary: Table, fewest: int) -> None:
        self.corpus, self.pairs = corpus, pairs
        self.samples = {
            name: [corpus.sample(pair, order, words_alone=True) for pair in pairs[name] for order in (0, 1)]
            for name in SETS
        }
        self.tokens = {name: self._tokens(name) for name in SETS}
        """(language, word, whether its sentence comes second) of each scored token, as in a trace's columns."""
        counts = [[np.bincount(t[t[:, 0] == lang, 1], minlength=len(dictionary)) for lang in (0, 1)]
                  for t in self.tokens.values()]  # fmt: skip
        self.words = [np.flatnonzero(often) for often in np.min(counts, 0) >= fewest]
        """Of each language, those that occur often enough in both sets: the rows and columns of a table."""
        self.right = dictionary[np.ix_(*self.words)]
        self.allowed = self.words[0][:, None] != self.words[1]
        generator = np.random.default_rng(0)
        self.half = [generator.permutation(len(words)) % 2 for words in self.words]

    def _tokens(self, name: str) -> np.ndarray:
        out = []
        for number, pair in enumerate(self.pairs[name]):
            for order in (0, 1):
                labels = self.samples[name][2 * number + order]["labels"]
                start = len(self.corpus.pairs[pair][order]) + 1  # of the second sentence
                keys = [(1 - order if at > start else order, word, at > start) for at, word in enumerate(labels)]
                out += [key for key in keys if key[1] != IGNORED_LABEL]
        return np.array(out)

    def single_tokens(self, name: str) -> list[dict[str, list[int]]]:
        """A sample for each scored token, in which nothing else is scored."""
        out = []
        for one in self.samples[name]:
            for at, label in enumerate(one["labels"]):
                if label != IGNORED_LABEL:
                    labels = [IGNORED_LABEL] * len(one["labels"])
                    labels[at] = label
                    out.append({"input_ids": one["input_ids"], "labels": labels})
        return out

    def by_word(self, scores: np.ndarray) -> Table:
        """Average scores of (train token, query token) by word, English of one set with French of the other.

        Of the four combinations of first and second sentences, that of two first ones is left out: a word that does
        not know its translation says nothing about it.
        """
        means = {}
        for name in SETS:
            languages, tokens, is_second = self.tokens[name].T
            for language, words in enumerate(self.words):
                for half in (0, 1):
                    chosen = (languages == language) & (is_second == half) & (words[:, None] == tokens)
                    means[name, language, half] = csr_array(chosen / chosen.sum(1, keepdims=True))

        def block(language: int, left: int, right: int) -> np.ndarray:
            rows = means["train", language, left] @ scores
            return (means["query", 1 - language, right] @ rows.T).T

        known = ((0, 1), (1, 0), (1, 1))
        return np.mean([part for one, two in known for part in (block(0, one, two), block(1, two, one).T)], 0)

    def look_up(self, table: Table) -> Table:
        return table[np.ix_(*self.words)]

    def ask(self, table: Table) -> dict[str, Any]:
        """Both questions, of a table as it is and centered, for both halves of the words."""
        centered = table - table.mean(0) - table.mean(1, keepdims=True)
        return {
            f"{task}{suffix}": question(self, np.where(self.allowed, values, -np.inf))
            for suffix, values in (("", table), (", centered", centered))
            for task, question in (("lexicon", Observed._lexicon), ("alignment", Observed._alignment))
        }

    def _lexicon(self, table: Table) -> dict[str, Any]:
        ranks, owners = [], []
        for language, (values, right) in enumerate(((table, self.right), (table.T, self.right.T))):
            asked = np.flatnonzero(right.any(1))
            ranks += [rank(values[given], right[given]) for given in asked]
            owners += [(language, given) for given in asked]
        return self._summary(ranks, owners)

    def _alignment(self, table: Table) -> dict[str, Any]:
        ranks, owners = [], []
        for pair in (pair for name in SETS for pair in self.pairs[name]):
            sentences = zip(self.words, self.corpus.pairs[pair], strict=True)
            here = [np.flatnonzero(np.isin(words, sentence)) for words, sentence in sentences]
            values, right = table[np.ix_(*here)], self.right[np.ix_(*here)]
            for language, (v, r) in enumerate(((values, right), (values.T, right.T))):
                asked = np.flatnonzero(r.any(1))
                ranks += [rank(v[given], r[given]) for given in asked]
                owners += [(language, here[language][given]) for given in asked]
        return self._summary(ranks, owners)

    def _summary(self, ranks: list[int], owners: list[tuple[int, int]]) -> dict[str, Any]:
        halves = np.array([self.half[language][word] for language, word in owners])
        _, owner = np.unique(np.array(owners), axis=0, return_inverse=True)
        out: dict[str, Any] = {}
        for number, half in enumerate(HALVES):
            here = halves == number
            row: dict[str, float] = {"asked": int(here.sum())}
            out[half] = row
            ranked = np.array(ranks)[here]
            for name, values in (("precision_at_1", ranked == 1), ("mean_reciprocal_rank", 1 / ranked)):
                row[name], row[f"{name}_error"] = float(values.mean()), bootstrap_error(values, owner[here])
        return out


def rank(values: np.ndarray, right: np.ndarray) -> int:
    """Of the best right candidate; ties count against it."""
    return 1 + int((values[~right] >= values[right].max()).sum())


def bootstrap_error(values: np.ndarray, owner: np.ndarray, times: int = 1000) -> float:
    """Standard error of the mean of values, owners being drawn again."""
    _, owner = np.unique(owner, return_inverse=True)
    sums, counts = np.bincount(owner, values), np.bincount(owner)
    drawn = np.random.default_rng(0).integers(len(counts), size=(times, len(counts)))
    return float((sums[drawn].sum(1) / counts[drawn].sum(1)).std())


# ------------------------------------------------------------------------------------------------------------ sampling


def sample(setting: str, model: nn.Module, observed: Observed, trained: Sequence[int], minutes: float,
           arguments: argparse.Namespace) -> tuple[dict[str, Table], dict[str, Any]]:  # fmt: skip
    """Tables from all draws and from the first 2⁻ᵏ of them, and what is to be said of the run."""
    weights, rise, *rest = setting.split("@")
    drawn_from = [observed.corpus.sample(pair, order) for pair in trained[:2000] for order in (0, 1)]
    loss = jostle.losses.next_token()

    def calibrate() -> tuple[dict[str, Table], dict[str, Any]]:
        found = jostle.calibrate(
            model, drawn_from[:64], loss=loss, weights=weights, rise=float(rise), kappa=KAPPA, batch_size=16,
            sampler=jostle.OrnsteinUhlenbeck(step_size=1.0), pilot=False,
        )  # fmt: skip
        return {}, {"localization": found.posterior.localization, "n_beta": found.posterior.n_beta, "rise": found.rise}

    # Kept, since a run goes on only with exactly the same settings, and a GPU's sums are not always the same.
    _, about = kept(arguments.work / f"calibration-{weights}@{rise}.npz", calibrate)
    if rest:
        about["n_beta"] = 0.0
    step = jostle.OrnsteinUhlenbeck(step_size=LONGEST_PULL / about["localization"])
    run = jostle.attribute(
        model, *(observed.samples[name] for name in SETS), sampling_data=drawn_from, loss=loss,
        posterior=jostle.Posterior(n_beta=about["n_beta"], localization=about["localization"], weights=weights),
        sampler=jostle.Gaussian() if rest else step, burn_in=3, thin=1, batch_size=16, chains=arguments.chains,
        draws=arguments.draws // arguments.chains, minutes=minutes, out=arguments.work / setting, progress=False,
        precision="bfloat16" if torch.cuda.is_available() else "model",
    )  # fmt: skip
    traces = [np.asarray(run.traces.losses(name)[:])[run.healthy_chains] for name in SETS]
    chains, draws, _ = traces[0].shape

    def table(part: slice) -> Table:
        return observed.by_word(covariance(*(trace[:, part] for trace in traces), normalize=True).values)

    counts = [draws >> halvings for halvings in range(6) if draws >> halvings >= 5]
    diagnostics = run.diagnostics()
    told = ("mean_loss_at_center", "mean_loss", "effective_draws")
    about |= {
        "moving_weights": MovingWeights(model, weights).total, "draws": chains * draws,
        **{key: diagnostics[key] for key in told}, "failed_chains": run.failed_chains,
        **resolution(table(slice(draws // 2)), table(slice(draws // 2, None)), observed),
    }  # fmt: skip
    return {f"{chains * count} draws": table(slice(count)) for count in counts}, about


def resolution(one: Table, other: Table, observed: Observed) -> dict[str, float]:
    """What is left of the tables of two halves of the draws when the noise of sampling is taken out.

    The mean of translations over the mean of other pairs of words, the standard deviation of those other pairs (what
    both halves share), and that of the noise at all draws.
    """
    others = observed.allowed & ~observed.right
    shared = float(np.cov(one[others], other[others])[0, 1])
    both = (one + other) / 2
    return {
        "signal": float(both[observed.right].mean() - both[others].mean()),
        "spread_of_others": math.sqrt(max(shared, 0.0)),
        "noise": math.sqrt(max(float(both[others].var()) - shared, 0.0)),
    }


def gradient_table(model: nn.Module, weights: str, observed: Observed) -> Table:
    """Cosines of token gradients: the limit of small perturbations and infinitely many draws, without a gradient."""
    found = jostle.attributors.gradient_similarity(
        model, *(observed.single_tokens(name) for name in SETS), loss=jostle.losses.next_token(), weights=weights,
        cosine=True, buffer_bytes=(40 if torch.cuda.is_available() else 2) << 30,
    )  # fmt: skip
    return observed.by_word(-found.values)


# ----------------------------------------------------------------------------------------------------------------- all


def draw(record: dict[str, Any], path: Path) -> None:
    """Precision at 1 of all methods, and how it grows with the draws."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(13, 5), layout="constrained")
    bars, curves = figure.subplots(1, 2)
    rows = {name: row for name, row in record["methods"].items() if "draws" not in name.split(", ")[-1]}
    for offset, task, color in ((0.2, "lexicon", "tab:blue"), (-0.2, "alignment", "tab:orange")):
        found = [row[task][HALVES[1]] for row in reversed(rows.values())]
        bars.barh(
            np.arange(len(rows)) + offset, [one["precision_at_1"] for one in found], 0.4, color=color, label=task,
            xerr=[one["precision_at_1_error"] for one in found],
        )  # fmt: skip
        bars.axvline(record["chance"][task], color=color, linestyle=":", label=f"{task}, chance")
    bars.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8)
    bars.set_xlabel("a translation comes first: share of the words for reporting")
    bars.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    for setting in record["settings"]:
        start = f"BIF {setting}, first "
        points = {int(name.split()[-2]): row for name, row in record["methods"].items() if name.startswith(start)}
        points[record["settings"][setting]["draws"]] = record["methods"][f"BIF {setting}"]
        draws = sorted(points)
        curves.plot(draws, [points[d]["alignment"][HALVES[1]]["precision_at_1"] for d in draws], "o-", label=setting)
    curves.axhline(record["chance"]["alignment"], color="black", linestyle=":", label="chance")
    curves.set_xscale("log")
    curves.set_xticks(ticks := [2**power for power in range(5, 15)], [f"{tick:,}" for tick in ticks])
    curves.xaxis.set_minor_formatter(NullFormatter())
    curves.set_xlim(*curves.dataLim.intervalx * [0.9, 1.1])
    curves.set(xlabel="draws", ylabel="alignment: precision at 1", ylim=(0, 1))
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def kept(path: Path, make: Any) -> tuple[dict[str, Table], dict[str, Any]]:
    """Tables and what is to be said of them: as an earlier call left them, or as made now."""
    if not path.exists():
        tables, about = make()
        unfinished = path.with_suffix(".unfinished.npz")
        named: Any = tables
        np.savez(unfinished, about=np.array(json.dumps(about, default=float)), **named)
        unfinished.rename(path)
    with np.load(path) as stored:
        return {name: stored[name] for name in stored.files if name != "about"}, json.loads(str(stored["about"]))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Does the per-token BIF find a word's translation?")
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--french", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where model and tables are kept between calls")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--figure", type=Path, help="also draw it (needs matplotlib)")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, metavar="WEIGHTS@RISE[@no-gradient]")
    parser.add_argument("--minutes", type=float, default=4, help="of sampling, half of it for the first setting")
    parser.add_argument("--draws", type=int, default=20_000, help="at most, of all chains together")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--words", type=int, default=2500, help="the most frequent of each language")
    parser.add_argument("--longest", type=int, default=LONGEST_PAIR, help="words of both sentences together")
    parser.add_argument("--least", type=int, default=20, help="tokens of a dictionary's word in the corpus")
    parser.add_argument("--fewest", type=int, default=4, help="tokens of a word in each observed set")
    parser.add_argument("--pairs", type=int, default=320, help="observed: as many trained on as held out")
    parser.add_argument("--held-out", type=int, default=1500, help="pairs")
    parser.add_argument("--hidden", type=int, default=192, help="the model's width, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=256, help="of training")
    arguments = parser.parse_args(words)
    with contextlib.nullcontext() if torch.cuda.is_available() else one_core():
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read([arguments.english, arguments.french], arguments.words, arguments.longest)
    order = np.random.default_rng(0).permutation(len(corpus.pairs)).tolist()
    held_out, trained = order[: arguments.held_out], order[arguments.held_out :]
    made, _ = kept(work / "dictionary.npz", lambda: ({"": build_dictionary(corpus, arguments.least)}, {}))
    dictionary = made[""]
    pairs = {
        name: choose(corpus, among, dictionary, arguments.pairs)
        for name, among in (("train", trained[:1500]), ("query", held_out))
    }
    observed = Observed(corpus, pairs, dictionary, arguments.fewest)
    model = build_model(len(corpus.words), arguments.hidden, arguments.layers, arguments.longest).to(device)
    stored, about_training = work / "model.safetensors", work / "training.json"
    if not stored.exists():
        tokens, others = (
            padded([corpus.sample(pair, order) for pair in part for order in (0, 1)], device)
            for part in (trained, held_out)
        )
        training = train_model(model, tokens, others, arguments.epochs, arguments.batch_size)
        about_training.write_text(json.dumps(training))
        # The tied unembedding is stored once.
        save_file({name: v.cpu() for name, v in model.state_dict().items() if name != "lm_head.weight"}, stored)
    model.load_state_dict(load_file(stored), strict=False)
    model.to(device).eval()

    entries = [f"{corpus.words[e]} {corpus.words[f]}" for e, f in np.argwhere(dictionary)]
    record: dict[str, Any] = {
        "workload": "Multi30k English–French, Llama architecture, word-level vocabulary, both orders",
        "parameters": sum(p.numel() for p in model.parameters()), "training": json.loads(about_training.read_text()),
        "pairs": len(corpus.pairs), "vocabulary": len(corpus.words),
        "observed": f"{arguments.pairs} pairs trained on, {arguments.pairs} held out, each in both orders",
        "dictionary": "IBM model 1 both ways on all pairs, √(t(f|e)·t(e|f)) ≥ 0.3, content words",
        "dictionary_entries": len(entries), "some_entries": entries[:: -(-len(entries) // 24)],
        "words": [len(words) for words in observed.words], "settings": {}, "methods": {},
    }  # fmt: skip
    generator = np.random.default_rng(0)
    noise = [observed.ask(generator.random(observed.right.shape)) for _ in range(10)]
    record["chance"] = {
        task: float(np.mean([one[task][HALVES[1]]["precision_at_1"] for one in noise])) for task in TASKS
    }
    say(f"{len(corpus.pairs):,} pairs, {len(corpus.words):,} words; {record['training']}; chance {record['chance']}")

    def add(name: str, table: Table) -> None:
        row = record["methods"][name] = observed.ask(table)
        found = {task: one[HALVES[1]] for task, one in row.items()}
        marks = [f"{task} {v['precision_at_1']:.3f} ± {v['precision_at_1_error']:.3f}" for task, v in found.items()]
        say(f"[{time.perf_counter() - started:.0f} s] {name:44}", "  ".join(marks))
        write_record(arguments.record, record)

    embeddings = nn.functional.normalize(model.get_input_embeddings().weight.detach(), dim=1).cpu().numpy()
    add("embedding cosine", observed.look_up(embeddings @ embeddings.T))
    for name, table in cooccurrence(corpus, [*pairs["train"], *pairs["query"]]).items():
        add(f"{name}, observed pairs", observed.look_up(table))
    for weights in dict.fromkeys(setting.split("@")[0] for setting in arguments.settings):
        found, _ = kept(
            work / f"gradients-{weights}.npz", lambda w=weights: ({"": gradient_table(model, w, observed)}, {})
        )
        add(f"gradient cosine {weights}", found[""])
    for setting in arguments.settings:
        # The first setting is the one that needs many draws.
        share = 0.5 if setting == arguments.settings[0] else 0.5 / (len(arguments.settings) - 1)
        minutes = arguments.minutes * (share if len(arguments.settings) > 1 else 1)
        tables, record["settings"][setting] = kept(
            work / f"{setting}.npz", lambda s=setting, m=minutes: sample(s, model, observed, trained, m, arguments)
        )
        say(record["settings"][setting])
        full, *fewer = tables
        for name in reversed(fewer):
            add(f"BIF {setting}, first {name}", tables[name])
        add(f"BIF {setting}", tables[full])
    if arguments.figure:
        draw(record, arguments.figure)


if __name__ == "__main__":
    main()
