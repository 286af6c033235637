"""A `Run` is a directory that is a result: what was sampled, and every score that can be read off it."""

from __future__ import annotations

import copy
import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, UInt8

from jostle.chains.recording import load_sums
from jostle.conditioning import (
    CHOICES,
    LITTLE_SUPPORT,
    Conditioned,
    Kappa,
    Moves,
    check_kappa,
    jackknife_error,
    most_supported,
    supports,
)
from jostle.config import fingerprint_names
from jostle.diagnose import diagnose, diagnose_sums, plots, read_sample
from jostle.errors import ChainsFailedError, EstimateWarning, InputError, warn
from jostle.estimate import (
    BUFFER_BYTES,
    Centering,
    Estimate,
    covariance,
    covariance_from_sums,
)
from jostle.runs.manifest import check_config, healthy_chains, place_of_traces, read_config, read_manifest
from jostle.scores import Entry, Ranking, Scores
from jostle.traces.store import MirroredPairs, Part, PickedColumns, Traces
from jostle.traces.tensor_files import read_tensors
from jostle.viewer.report import Inline, write_report
from jostle.viewer.sources import RunSource

Reduction = Literal["mean", "sum"]


def load(path: str | Path) -> Run:
    """Open the directory of a finished run."""
    run = Run(Path(path))
    if run.manifest["status"] != "complete":
        raise InputError(
            "run",
            got=f"{path}, which is not finished",
            expected="a complete run",
            fix=f"jostle resume {path} goes on, or the same jostle.attribute(...) again; jostle view shows it as it is",
        )
    check_config(run.config, run.manifest)
    if run.config["keep"] == "traces":
        for name in run.traces.arrays:
            missing = run.traces.trace(name).missing_chunks(run.healthy_chains)
            if missing:
                raise InputError(
                    "traces", got=f"no {missing[0]} in {path}", expected="a whole run", fix=f"see jostle check {path}"
                )
    return run


class Run:
    """The result of `attribute`: traces on disk, and the scores that can be read off them.

    A run directory holds ``config.yaml``, ``manifest.json`` (fingerprints, versions, status) and ``traces.zarr``
    (or ``covariance.safetensors``). Sampling is the expensive part and is done; every method here is a view.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self.config = read_config(directory)
        self._known_losses: dict[tuple[str, Reduction], Any] = {}
        self._known_moves: dict[str, Moves] = {}
        self._known_supports: dict[tuple[str | None, Kappa], dict[float, float] | None] = {}
        self._known_diagnosis: dict[str, Any] | None = None
        self._warned_of: set[tuple[str | None, Kappa]] = set()

    def __repr__(self) -> str:
        failed = len(self.failed_chains)
        lost = f", {failed} failed" if failed else ""
        return f"Run({str(self.directory)!r}: {self.config['chains']} chains{lost} × {self.draws} draws)"

    @property
    def draws(self) -> int:
        """Draws of each chain: fewer than asked for where the run stopped early."""
        return self.manifest.get("draws", self.config["draws"])

    @property
    def stopped(self) -> str | None:
        """Why a run with ``until`` or ``minutes`` stopped where it did."""
        wanted, measured = self.config.get("until") or {}, self.manifest.get("measured", {})
        if not wanted and self.config.get("minutes") is None:
            return None
        numbers = [
            f"{name} {'unknown' if measured.get(name) is None else format(measured[name], '.3g')} of {wanted[name]:g}"
            for name in wanted
        ]
        if self.draws == self.config["draws"]:
            numbers.append("all of them")
        elif len(self.healthy_chains) == 0:
            numbers.append("no chain is left")
        elif not self.manifest.get("reached"):
            numbers.append(f"{self.config['minutes']:g} minutes")
        # Whoever sets a goal wants it reached by nearly all; a verdict is on what most are worth, which is more.
        known = measured.get("ess") is not None
        counted = " (ess is what 19 in 20 losses have, the verdict's effective draws 3 in 4)" if known else ""
        return f"stopped after {self.draws} draws of each chain: {', '.join(numbers)}{counted}"

    @property
    def antithetic(self) -> bool:
        """Whether chains are mirrored pairs: 2k and 2k + 1 have the same noise with opposite signs."""
        return self.config.get("antithetic", False)

    @property
    def failed_chains(self) -> list[int]:
        """The chains that left the finite numbers; no estimate uses them."""
        return [failure["chain"] for failure in self.manifest["failed_chains"]]

    @property
    def healthy_chains(self) -> np.ndarray:
        """The chains that estimates use: those that did not fail, nor, in an antithetic pair, their mirror image."""
        return healthy_chains(self.config["chains"], self.failed_chains, antithetic=self.antithetic)

    @property
    def traces(self) -> Traces:
        """The recorded losses."""
        if self.config["keep"] != "traces":
            raise InputError(
                "run",
                got="keep='covariance'",
                expected="a run that kept its traces",
                fix="sample with keep='traces'",
            )
        return Traces(place_of_traces(self.directory, self.manifest))

    def examples(self, name: str) -> list[dict[str, Any]]:
        """Return what the run keeps to show of its ``"train"`` or ``"query"`` examples, if anything."""
        path = self.directory / "examples" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n") if line] if path.is_file() else []

    def images(self, name: str) -> UInt8[np.ndarray, "sample height width channel"] | None:
        """Return the images of its ``"train"`` or ``"query"`` examples, where the run was given any."""
        path = self.directory / "examples" / f"{name}.images.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False) if path.is_file() else None

    def influence(
        self,
        *,
        normalize: bool = False,
        on: str | None = None,
        reduction: Reduction = "mean",
        centering: Centering = "pooled",
        part: Part | None = None,
        kappa: Kappa = 0.0,
        train: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
        standard_error: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> Scores:
        """Return the Bayesian influence of every training example on every query: −Cov(ℓᵢ, φⱼ).

        The noise of the two chains of an antithetic pair has opposite signs. What of a loss changes sign with it, the
        odd part (ℓ⁺ − ℓ⁻)/2, and what does not, the even part (ℓ⁺ + ℓ⁻)/2, are uncorrelated, so that the influence is
        the sum of that of both: Cov(ℓᵢ, φⱼ) = Cov(oddᵢ, oddⱼ) + Cov(evenᵢ, evenⱼ). For quadratic losses around w*
        (`Gaussian`, or any rule where w* is the minimum) the odd part is the first-order term gᵢᵀΣgⱼ, and the even one
        ½·tr(HᵢΣHⱼΣ).

        Args:
            normalize: −correlation instead, in [−1, 1].
            on: the name of an observable, instead of the query losses.
            reduction: for per-token losses, what a sequence's loss is: the ``"mean"`` of its tokens' or their
                ``"sum"``. Its score is then the mean, or the sum, of its block of token covariances.
            centering: around the mean over all chains (``"pooled"``, the paper's) or each chain's own (``"within"``).
            part: of a run with ``antithetic=True``, the ``"odd"`` or ``"even"`` part alone; normalized, it is the
                correlation of these parts.
            kappa: read at a larger n_beta than was sampled, by holding the training losses: where they move most, their
                variance falls to 1/(1 + kappa). 0 reads what was sampled, as in the paper; docs/reading.md says when
                10 is better. ``"auto"`` is the largest of 10, 3 and 1 that the draws support, or 0: at which scores
                from halves of them agree about as well as they do at 0. What was chosen is
                ``provenance["kappa"]``. Takes memory for draws × training examples, or draws × draws. Of per-token
                losses, strands of tokens are held (`jostle.traces.store.Strands`), which take up to 512 MB more.
            train: only these training examples, in this order (``provenance["train"]``).
            queries: only these queries, in this order (``provenance["query"]``).
            standard_error: also estimate the Monte Carlo standard error of every score.
            buffer_bytes: what may be allocated beyond the matrix itself. Of per-token losses, those of whole sequences
                are held besides, where they take no more than `jostle.traces.store.HELD_BYTES`.
        """
        if reduction not in ("mean", "sum"):
            raise InputError("reduction", got=repr(reduction), expected="'mean' or 'sum'")
        self._require_chains()
        picked = {"train": train, "query": queries}
        if self.config["keep"] == "covariance":
            if standard_error or on is not None or reduction != "mean" or part is not None or kappa:
                raise InputError(
                    "run",
                    got="keep='covariance', which keeps nothing but train × query",
                    expected="a run that kept its traces for errors, observables, sums, parts and kappa",
                    fix="sample with keep='traces'",
                )
            held, read_at = 0.0, {"kappa": 0.0}
            sums, _ = load_sums(self.directory / "covariance.safetensors")
            estimate = covariance_from_sums(sums, centering=centering, normalize=normalize)
            for axis, (name, wanted) in enumerate(picked.items()):
                if wanted is not None:
                    columns = check_indices(name, wanted, estimate.values.shape[axis])
                    estimate = replace(estimate, values=np.ascontiguousarray(estimate.values.take(columns, axis)))
        else:
            held, read_at = self._read_at(kappa, part, on)
            left = self._sequence_losses("train", reduction)
            right = self.traces.observable(on) if on is not None else self._sequence_losses("query", reduction)
            left, right = (
                side if wanted is None else PickedColumns(side, check_indices(name, wanted, side.shape[2]))
                for side, (name, wanted) in zip((left, right), picked.items(), strict=True)
            )
            estimate = self._estimate(
                left,
                right,
                part,
                held,
                centering=centering,
                normalize=normalize,
                standard_error=standard_error,
                buffer_bytes=buffer_bytes,
            )
        # The potential holds a multiple of each sequence's mean loss, so only for means is there a scale.
        scale = self.manifest["scale"] if reduction == "mean" and not normalize and not held else None
        about = {
            "reduction": reduction,
            "centering": centering,
            "on": on or "query",
            "part": part or "all",
            **read_at,
        }
        about |= {name: [int(index) for index in wanted] for name, wanted in picked.items() if wanted is not None}
        return self._scores(estimate, normalize, scale, about)

    def top(
        self, k: int = 10, *, queries: Sequence[int] | None = None, standard_error: bool = False, **reading: Any
    ) -> list[Ranking]:
        """Return the ``k`` most helpful and most harmful training examples of each query, without holding the matrix.

        ``queries`` are all of them where none are named. What else is given is for `influence`, which is asked for as
        many columns at a time as fit into its ``buffer_bytes``, and for errors of nothing but what is returned.
        """
        if self.config["keep"] == "covariance":  # the matrix is what there is
            blocks = [queries]
        else:
            on = reading.get("on")
            there = self.traces.columns("query").samples if on is None else self.traces.observable(on).shape[2]
            wanted = range(there) if queries is None else list(queries)
            room = max(1, reading.get("buffer_bytes", BUFFER_BYTES) // (8 * self.traces.columns("train").samples))
            blocks = [wanted[first : first + room] for first in range(0, len(wanted), room)]
        found: list[Ranking] = []
        for block in blocks:
            scores = self.influence(queries=block, **reading)
            names = list(range(scores.shape[1]) if block is None else block)
            rankings = [replace(scores.top(column, k), query=int(query)) for column, query in enumerate(names)]
            if standard_error:
                reading["kappa"] = scores.provenance["kappa"]  # as it was chosen
                rankings = self._with_errors(rankings, reading)
            found += rankings
        return found

    def _with_errors(self, rankings: Sequence[Ranking], reading: Mapping[str, Any]) -> list[Ranking]:
        """Rankings with the errors of what they name, which is little of all that the same scores would have."""
        named = sorted({entry.index for one in rankings for entry in (*one.helpful, *one.harmful)})
        if not named:
            return list(rankings)
        queries = [ranking.query for ranking in rankings]
        errors = self.influence(train=named, queries=queries, standard_error=True, **reading).standard_error
        assert errors is not None
        place = {index: row for row, index in enumerate(named)}

        def completed(entries: Sequence[Entry], column: int) -> list[Entry]:
            return [replace(entry, standard_error=float(errors[place[entry.index], column])) for entry in entries]

        return [
            replace(one, helpful=completed(one.helpful, column), harmful=completed(one.harmful, column))
            for column, one in enumerate(rankings)
        ]

    def token_influence(
        self,
        train: int,
        query: int,
        *,
        whole_query: bool = False,
        normalize: bool = False,
        centering: Centering = "pooled",
        part: Part | None = None,
        kappa: Kappa = 0.0,
        standard_error: bool = False,
    ) -> Scores:
        """Return the influence of each token of one training sequence on each token of one query: −Cov(ℓᵢₛ, ℓⱼₛ').

        Rows and columns are the *scored* tokens: not the first of a sequence, nor those of a prompt. Where they stand
        is in ``provenance["train_positions"]`` and ``provenance["query_positions"]``. With ``whole_query`` there is
        one column, the mean loss of the query's tokens. ``part`` and ``kappa`` are those of `influence`.
        """
        self._require_chains()
        self._require_set("query")
        blocks, positions = [], {}
        for name, sample in (("train", train), ("query", query)):
            columns = self.traces.columns(name)
            if not columns.per_token:
                raise InputError(name, got="one loss a sample", expected="per-token losses", fix="use influence()")
            if not 0 <= sample < columns.samples:
                raise InputError(name, got=sample, expected=f"an index from 0 to {columns.samples - 1}")
            blocks.append(np.asarray(self.traces.losses(name)[:, :, columns.of(sample)]))
            positions[f"{name}_positions"] = columns.positions_of(sample)
        if whole_query:
            blocks[1] = blocks[1].mean(axis=2, keepdims=True)
        held, read_at = self._read_at(kappa, part)
        estimate = self._estimate(
            blocks[0],
            blocks[1],
            part,
            held,
            centering=centering,
            normalize=normalize,
            standard_error=standard_error,
        )
        about = {"train": train, "query": query, "centering": centering, "part": part or "all", **read_at}
        about |= positions
        return self._scores(estimate, normalize, None, about)

    @np.errstate(over="ignore", invalid="ignore")  # of chains that ran away the verdict says so, in words
    def diagnostics(self, *, plot: str | Path | None = None, support: bool = True) -> dict[str, Any]:
        """Return what a user should know before trusting the scores, with a verdict in words.

        ``verdict`` has a ``level`` (good, doubtful, unreliable), a ``summary``, and ``reasons`` with a number and what
        to do. The rest is what it rests on, and plain data: ``mean_loss`` and ``mean_loss_at_center`` (of the training
        examples), ``autocorrelation_time`` (draws for each effective one, of the slower losses), ``effective_draws``
        (None where chains are too short to tell), R-hat and effective sizes of ``losses`` and of the ``products`` that
        a covariance averages, ``drift``, ``agreement`` of the scores from halves, ``local_learning_coefficient``,
        ``temperature`` (1 is the target's; None where it was not measured), ``failed_chains`` and ``remarks``.
        ``docs/diagnostics.md`` explains each of them.

        Args:
            plot: also draw them, into a file whose name ends in .png, .svg or .pdf (needs the extra ``plots``).
            support: also ask how far the draws support reading at a larger n_beta (``kappa_support``; ``kappa`` is
                what ``influence(kappa="auto")`` reads at), which takes about as long as reading.
        """
        if plot is not None:
            plots.check(plot)
        if self.config["keep"] != "traces":
            if plot is not None:
                raise InputError(
                    "plot",
                    got="keep='covariance'",
                    expected="a run that kept its traces",
                    fix="sample with keep='traces'",
                )
            if len(self.healthy_chains) == 0:
                return diagnose(self.config, self.manifest, None)
            sums, _ = load_sums(self.directory / "covariance.safetensors")
            center, _ = read_tensors(self.directory / "center.safetensors")
            return diagnose_sums(self.config, self.manifest, sums, center["loss on train"])
        sample = read_sample(self.traces, self.healthy_chains, mirrored=self.antithetic)
        config = self.config | {"draws": self.draws}
        if self._known_diagnosis is None:
            self._known_diagnosis = diagnose(config, self.manifest, sample if len(sample.chains) else None)
        found = copy.deepcopy(self._known_diagnosis)
        if support and len(sample.chains) and "query" in self.traces.sets:
            supported = self._supports("auto")
            found["kappa"] = most_supported(supported)
            found["kappa_support"] = supported and {f"{kappa:g}": value for kappa, value in supported.items()}
        if plot is not None:
            plots.draw(found, sample, config, Path(plot))
        return found

    def show(self, query: int = 0, *, k: int = 10, kappa: Kappa = 0.0, height: int = 640) -> Inline:
        """Show a query in a notebook: its text or image, and the ``k`` training examples that helped and harmed most.

        Tokens can be clicked as in ``jostle view``; the page is kept with the notebook and needs no network. ``kappa``
        is that of `influence`.
        """
        source = RunSource(self.directory, Run, kappa)
        return Inline(write_report([source], queries=[query], k=k, health=False), height=height)

    def _require_chains(self) -> None:
        if len(self.healthy_chains) == 0:
            raise ChainsFailedError(f"{self.why_no_chain}: this run has no scores")

    @property
    def why_no_chain(self) -> str:
        """Which chains failed where none is left; of an antithetic pair one is enough."""
        failed, chains = sorted(self.failed_chains), self.config["chains"]
        partners = [chain for chain in range(chains) if chain not in failed]
        if not partners:
            return f"all {chains} chains failed"
        names = [", ".join(map(str, some)) for some in (failed, partners)]
        if chains == 2:
            return f"chain {names[0]} failed, and chain {names[1]} is left out with it as its mirror image"
        return f"chains {names[0]} failed, and chains {names[1]} are left out with them as their mirror images"

    def _estimate(
        self, left: Any, right: Any, part: Part | None, kappa: float, *, centering: Centering, **options: Any
    ) -> Estimate:
        """The covariance of two traces, or of their odd or even parts, or with the training losses held."""
        chains = self.healthy_chains
        if kappa:
            wants_error = options.pop("standard_error")
            if wants_error and centering == "within":
                raise InputError(
                    "kappa",
                    got="standard errors within chains",
                    expected="centering='pooled' for standard errors",
                    fix="ask without kappa",
                )
            moves = self._moves(centering)
            estimate = covariance(Conditioned(left, moves, kappa), Conditioned(right, moves, kappa), **options)
            if centering == "within" and not options["normalize"]:  # mapped, they are one chain of all draws
                estimate.values[:] *= (moves.draws - 1) / (moves.draws - len(chains))
            estimate = replace(estimate, between_chain_share=moves.between_chain_share)
            if not wants_error:
                return estimate
            errors, batches = jackknife_error(moves, left, right, chains, kappa, mirrored=self.antithetic, **options)
            return replace(estimate, standard_error=errors, batches=batches.count, remark=batches.remark)
        if part is None:
            return covariance(left, right, chains=chains, centering=centering, mirrored=self.antithetic, **options)
        if part not in ("odd", "even"):
            raise InputError("part", got=repr(part), expected="'odd' or 'even'")
        if not self.antithetic:
            raise InputError(
                "part", got=f"{part!r} of chains that are not mirrored", expected="a run with antithetic=True"
            )
        parts = (MirroredPairs(trace, chains, part) for trace in (left, right))
        return covariance(*parts, centering=centering, **options)

    def _read_at(self, kappa: Kappa, part: Part | None, on: str | None = None) -> tuple[float, dict[str, Any]]:
        """The κ that was asked for, or chosen, and what scores say of it."""
        check_kappa(kappa)
        if kappa == 0:
            return 0.0, {"kappa": 0.0}
        if part is not None:
            raise InputError(
                "kappa", got=f"{kappa} for the {part} part", expected="all of the influence", fix="ask without kappa"
            )
        if kappa != "auto":
            self._moves("pooled")  # refuses what is too much to hold before anything is said of it
        found = self._supports(kappa, on)
        if kappa == "auto":
            held = most_supported(found)
            return held, {
                "kappa": held,
                "kappa_support": None if found is None else found.get(held, 1.0),
                "kappa_chosen": True,
            }
        support = None if found is None else found[float(kappa)]
        if (support is None or support < LITTLE_SUPPORT) and (on, kappa) not in self._warned_of:
            self._warned_of.add((on, kappa))
            says = "are too few to tell whether they support" if support is None else "hardly support"
            left = "" if support is None else f": noise leaves {support:.0%} of what it leaves of scores as sampled"
            warn(f"the draws {says} kappa={kappa:g}{left}; read with kappa='auto', or raise draws", EstimateWarning)
        return float(kappa), {"kappa": float(kappa), "kappa_support": support}

    def _supports(self, kappa: Kappa, on: str | None = None) -> dict[float, float] | None:
        """How far the draws support a κ, or each of those that "auto" chooses from; None where nobody can tell."""
        if (on, kappa) not in self._known_supports:
            other = self.traces.observable(on) if on is not None else self._sequence_losses("query", "mean")
            try:
                self._known_supports[on, kappa] = supports(
                    self._sequence_losses("train", "mean"), other, self.healthy_chains,
                    CHOICES if kappa == "auto" else [float(kappa)],
                    together=2 if self.antithetic else 1, moves=self._moves("pooled"),
                )  # fmt: skip
            except InputError:  # nothing moved, or there are too many draws to hold
                self._known_supports[on, kappa] = None
        return self._known_supports[on, kappa]

    def _moves(self, centering: Centering) -> Moves:
        """How the training losses move: found once, for it takes a while."""
        if centering not in self._known_moves:
            self._require_set("train")
            self._known_moves[centering] = Moves(self.traces.held_losses("train"), self.healthy_chains, centering)
        return self._known_moves[centering]

    def _require_set(self, name: str) -> None:
        if name not in self.traces.sets:
            raise InputError(
                name,
                got=f"a run without a {name} set",
                expected="one",
                fix="pass on=NAME to influence() for an observable",
            )

    def _sequence_losses(self, name: str, reduction: Reduction) -> Any:
        self._require_set(name)
        if (name, reduction) not in self._known_losses:
            self._known_losses[name, reduction] = self.traces.sequence_losses(name, reduction)
        return self._known_losses[name, reduction]

    def _scores(self, estimate: Estimate, normalize: bool, scale: float | None, provenance: dict[str, Any]) -> Scores:
        if estimate.remark is not None:
            warn(estimate.remark, EstimateWarning)
        values = np.negative(estimate.values, out=estimate.values)
        names = self.manifest.get("moving_parameters")  # an older one may lack it
        moving = {} if names is None else {"moving": fingerprint_names(names)}
        return Scores(
            values=values,
            method="bif",
            normalized=normalize,
            scale=scale,
            standard_error=estimate.standard_error,
            degrees_of_freedom=estimate.degrees_of_freedom,
            provenance={
                "jostle": self.manifest["jostle"],
                "fingerprints": {**self.manifest["fingerprints"], **moving},
                "between_chain_share": estimate.between_chain_share,
                "seconds": sum(self.manifest["seconds"].values()),
                **provenance,
            },
        )


def check_indices(name: str, indices: Sequence[int], there: int) -> Int[np.ndarray, " index"]:
    """Require indices of training examples or queries, one or more."""
    if not len(indices):
        raise InputError(name, got="none", expected="one or more")
    for index in indices:
        if not isinstance(index, numbers.Integral) or not 0 <= index < there:
            raise InputError(name, got=repr(index), expected=f"an index below {there}")
    return np.array(indices, dtype=np.int64)
