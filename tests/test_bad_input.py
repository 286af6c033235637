"""Bad input is one clear line: what was got, what was expected, what to do. Nothing half-written is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import jostle
from conftest import Says
from jostle.errors import EstimateWarning
from jostle.runs.layout import write_manifest

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def with_weight(value: float) -> nn.Module:
    broken = model()
    with torch.no_grad():
        broken[0].weight[1, 2] = value
    return broken


class BatchStatistics(nn.Module):
    """Normalizes with the statistics of the batch, in eval mode too; PyTorch refuses a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.norm(inputs))


class BatchMean(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs - inputs.mean(0))


class HalfSampler:
    """Has not all that a sampler has."""

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        return {}

    def step(self, weights: Tensor, *others: Any, burning_in: bool) -> tuple[Tensor, dict[str, Tensor]]:
        return weights, {}

    def check(self, potential: Any, *, burn_in: int) -> None:
        pass


class ChangesItsInput(nn.Module):
    """Normalizes what it is given where it stands; only large batches, where so asked."""

    def __init__(self, least: int = 1) -> None:
        super().__init__()
        self.out, self.least = nn.Linear(3, 2), least

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) >= self.least:
            inputs -= 0.5
        return self.out(inputs)


class AlwaysDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(inputs, 0.5, training=True))


def cross_entropy(reduction: str) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def too_short(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")[1:]


def squeezed(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").squeeze()


def detached(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").detach()


def infinite_on_five(model: nn.Module, batch: Any) -> Tensor:
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return torch.where((batch[0] == X[5]).all(1), torch.inf, losses)


def popped(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return nn.functional.cross_entropy(model(batch["inputs"]), labels, reduction="none")


P, S = jostle.Posterior, jostle.SGLD

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "empty training set": (lambda: {"train": (X[:0], Y[:0])}, r"^train: got an empty data set, expected at least one"),
    "empty query set": (lambda: {"query": []}, r"^query: got an empty data set, expected at least one"),
    "empty sampling data": (lambda: {"sampling_data": (X[:0], Y[:0])}, r"^sampling_data: got an empty data set"),
    "unequal columns": (lambda: {"train": (X, Y[:7])}, r"^train: got tensors of lengths \[8, 7\], expected one row"),
    "an iterator": (lambda: {"train": iter([(X[0], Y[0])])}, r"^train: got a list_iterator, expected .*; make a list of its samples$"),
    "uncollatable samples": (lambda: {"train": [("a", object())]}, r"^train: got samples that do not collate"),
    "no query": (lambda: {"query": None}, r"^query: got neither a query set nor observables"),
    "NaN weights": (lambda: {"model": with_weight(float("nan"))}, r"^weight '0\.weight': got NaN or infinite values"),
    "infinite weights": (lambda: {"model": with_weight(float("inf"))}, r"^weight '0\.weight': got NaN or infinite"),
    "loss not finite": (lambda: {"loss": infinite_on_five}, r"^loss at w\* on train: got inf for example 5 \(1 of 8"),
    "scalar loss": (lambda: {"loss": cross_entropy("mean")}, r"^loss on train: got shape \(\) for a batch of 8, .*'none'"),
    "short loss": (lambda: {"loss": too_short}, r"^loss on train: got shape \(7,\) for a batch of 8, expected \(8,\)"),
    "scalar potential": (lambda: {"potential_loss": cross_entropy("sum")}, r"^loss on train: got shape \(\)"),
    "batch neighbours": (lambda: {"model": BatchMean()}, r"^loss on train: got .* with other neighbours, expected"),
    "batch statistics": (lambda: {"model": BatchStatistics()}, r"^loss on train: got 'Expected more than 1 .* alone"),
    "input changed in place": (
        lambda: {"model": ChangesItsInput()},
        r"^loss on train: got a model or loss that changes its input, expected the same .*x = x\.clone\(\)",
    ),
    "input changed in larger batches": (
        lambda: {"model": ChangesItsInput(9), "train": (torch.zeros(9, 3), torch.zeros(9, dtype=torch.long))},
        r"^loss on train: got a model or loss that changes its input",
    ),
    "label taken out of the batch": (
        lambda: {"loss": popped, "train": {"inputs": X, "labels": Y}, "query": {"inputs": X[:2], "labels": Y[:2]}},
        r"^loss on train: got a model or loss that changes its input, .* batch = dict\(batch\)",
    ),
    "random loss": (lambda: {"model": AlwaysDropout()}, r"^loss on train: got two different values for example \d"),
    "no weight matches": (
        lambda: {"posterior": P(n_beta=1, localization=1, weights="attention.*")},
        r"^weights: got 'attention\.\*', which matches no weight, expected .*4 floating-point weights \(0\.weight",
    ),
    "everything frozen": (lambda: {"model": model().requires_grad_(False)}, r"every weight is frozen: pass weights='\*'"),
    "bad expression": (lambda: {"posterior": P(n_beta=1, localization=1, weights="re:(")}, r"^weights: got '\('"),
    "zero step": (lambda: {"sampler": S(step_size=0.0)}, r"^step_size: got 0\.0, expected a positive number$"),
    "negative step": (lambda: {"sampler": S(step_size=-1e-5)}, r"^step_size: got -1e-05, expected a positive"),
    "NaN step": (lambda: {"sampler": S(step_size=float("nan"))}, r"^step_size: got nan, expected a positive"),
    "unstable step": (lambda: {"sampler": S(step_size=1e-3)}, r"^step_size: got 0\.001 .* below 4/localization = 0\.0004"),
    "unstable Leimkuhler-Matthews": (lambda: {"sampler": jostle.LeimkuhlerMatthews(step_size=1e-3)}, r"^step_size: got 0\.001"),
    "unstable BAOAB": (lambda: {"sampler": jostle.BAOAB(step_size=1e-3)}, r"^step_size: got 0\.001"),
    "unstable SGNHT": (lambda: {"sampler": jostle.SGNHT(step_size=1e-3)}, r"^step_size: got 0\.001"),
    "zero friction": (lambda: {"sampler": jostle.BAOAB(step_size=1e-5, friction=0)}, r"^friction: got 0, expected a positive"),
    "friction without a unit": (
        lambda: {"sampler": jostle.SGNHT(step_size=1e-5), "posterior": P(n_beta=1, localization=0)},
        r"^localization: got 0 without a prior, expected .* by which friction is measured; LeimkuhlerMatthews needs neither$",
    ),
    "the control with a gradient": (
        lambda: {"sampler": jostle.Gaussian(), "posterior": P(n_beta=200, localization=1e4)},
        r"^n_beta: got 200 with the Gaussian sampler, which uses no gradient, expected n_beta=0; set n_beta to 0",
    ),
    "the control from w* itself": (
        lambda: {"sampler": jostle.Gaussian(), "posterior": P(n_beta=0, localization=1), "burn_in": 0},
        r"^burn_in: got 0 with the Gaussian sampler, expected at least 1: step 0 is w\* itself",
    ),
    "control variates": (lambda: {"control_variates": "yes"}, r"^control_variates: got 'yes', expected True or False$"),
    "smoothing": (lambda: {"sampler": jostle.RMSpropSGLD(step_size=1, smoothing=1.0)}, r"^smoothing: got 1\.0"),
    "stabilizer": (lambda: {"sampler": jostle.RMSpropSGLD(step_size=1, stabilizer=0)}, r"^stabilizer: got 0"),
    "no chains": (lambda: {"chains": 0}, r"^chains: got 0, expected a positive whole number$"),
    "negative draws": (lambda: {"draws": -3}, r"^draws: got -3, expected a positive whole number$"),
    "fractional draws": (lambda: {"draws": 2.5}, r"^draws: got 2\.5, expected a positive whole number$"),
    "one draw": (lambda: {"chains": 1, "draws": 1}, r"^draws: got one draw in all, expected at least two"),
    "zero thin": (lambda: {"thin": 0}, r"^thin: got 0, expected a positive whole number$"),
    "negative burn-in": (lambda: {"burn_in": -1}, r"^burn_in: got -1, expected a whole number that is not negative$"),
    "zero batch": (lambda: {"batch_size": 0}, r"^batch_size: got 0, expected a positive whole number$"),
    "zero observation": (lambda: {"observation_batch_size": 0}, r"^observation_batch_size: got 0, expected a positive"),
    "negative seed": (lambda: {"seed": -1}, r"^seed: got -1"),
    "what to keep": (lambda: {"keep": "everything"}, r"^keep: got 'everything', expected 'traces' or 'covariance'$"),
    "negative localization": (lambda: {"posterior": P(n_beta=1, localization=-1)}, r"^localization: got -1, expected a"),
    "negative n_beta": (lambda: {"posterior": P(n_beta=-1, localization=1)}, r"^n_beta: got -1, expected a finite"),
    "NaN n_beta": (lambda: {"posterior": P(n_beta=float("nan"), localization=1)}, r"^n_beta: got nan, expected a finite"),
    "nothing holds": (lambda: {"posterior": P(n_beta=0, localization=0)}, r"^posterior: got n_beta = localization = pr"),
    "frozen at once": (
        lambda: {"sampler": jostle.RMSpropSGLD(step_size=1e-5, freeze_after_burn_in=True)},
        r"^burn_in: got 0 with freeze_after_burn_in=True, expected steps .* a burn-in of 200 steps",
    ),
    "step as text": (lambda: {"sampler": S(step_size="1e-5")}, r"^step_size: got '1e-5', expected a positive number$"),
    "n_beta missing": (lambda: {"posterior": P(n_beta=None, localization=1)}, r"^n_beta: got None, expected a finite"),
    "bad sampling example": (
        lambda: {"sampling_data": (torch.cat([X, X[:1] * torch.nan]), torch.cat([Y, Y[:1]]))},
        r"^loss at w\* on sampling_data: got nan for example 8",
    ),
    "float64 inputs": (lambda: {"query": (X.double().numpy(), Y.numpy())}, r"^loss on query: got RuntimeError: .*dtype"),
    "labels out of range": (lambda: {"query": (X, Y + 7)}, r"^loss on query: got RuntimeError: index 7 is out of bounds"),
    "data frame": (lambda: {"train": pandas.DataFrame({"a": [1]})}, r"^train: got a DataFrame that cannot be indexed"),
    "squeezed loss": (lambda: {"loss": squeezed}, r"^loss on train: got shape \(\) for a batch of 1, expected \(1,\)"),
    "loss module": (lambda: {"loss": nn.CrossEntropyLoss()}, r"^loss: got a CrossEntropyLoss, expected a function f\("),
    "loss not called": (lambda: {"loss": jostle.losses.classification}, r"^loss: got losses\.classification itself, .* call"),
    "loss by name": (lambda: {"loss": "classification"}, r"^loss: got a str, expected a function"),
    "detached loss": (lambda: {"loss": detached}, r"^gradient of the loss on train: got element 0 of tensors does not"),
    "state dict": (lambda: {"model": model().state_dict()}, r"^model: got a OrderedDict, expected an instance of torch"),
    "sampler class": (lambda: {"sampler": S}, r"^sampler: got the class SGLD, expected an update rule such as"),
    "sampler without all of it": (lambda: {"sampler": HalfSampler()}, r"^sampler: got a HalfSampler, expected an update"),
    "minutes and sums": (
        lambda: {"keep": "covariance", "minutes": 1}, r"^minutes: got keep='covariance', expected keep='traces'"
    ),
    "sampler number": (lambda: {"sampler": 1e-3}, r"^sampler: got a float, expected an update rule such as"),
    "posterior dict": (lambda: {"posterior": {"n_beta": 1}}, r"^posterior: got a dict, expected a jostle\.Posterior$"),
    "loader": (lambda: {"train": DataLoader(TensorDataset(X, Y))}, r"^train: got a DataLoader, .*; pass loader\.dataset$"),
    "examples": (lambda: {"examples": {"train": [{}]}}, r"^examples: got 1 of 'train', expected 8 of 'train' and 2 of"),
    "examples list": (lambda: {"examples": [1]}, r"^examples: got a list, expected"),
    "negative label": (lambda: {"train": (X, Y - 100)}, r"^loss on train: got RuntimeError: index -100 is out of bounds"),
    "empty sequence": (lambda: {"train": [{"input_ids": []}]}, r"^train: got samples that .*\(a sequence without a token"),
    "slash": (lambda: {"observables": {"a/b": lambda m: m[0].bias}}, r"^observables: got the name 'a/b', expected"),
    "observable thrown away": (
        lambda: {"observables": {"b": lambda m: m[0].bias}, "keep": "covariance"},
        r"^observables: got keep='covariance', which keeps nothing but train × query, expected keep='traces'$",
    ),
    "whole observable": (
        lambda: {"observables": {"x": lambda m: (m[0].bias > 0).long()}}, r"^observable 'x': got values of torch\.int64"
    ),
    "observable that is no tensor": (
        lambda: {"observables": {"x": lambda m: m[0].bias.sum().item()}}, r"^observable 'x': got a float, expected a tensor"
    ),
    "observable": (lambda: {"observables": {"x": lambda m: m[0].weight}}, r"^observable 'x': got shape \(4, 3\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_nothing_written(name: str, tmp_path: Path, says: Says) -> None:
    make, message = CASES[name]
    arguments: dict[str, Any] = {"model": model(), "train": (X, Y), "query": (X[:2], Y[:2]), "draws": 2}
    with pytest.raises(jostle.InputError, match=message) as caught:
        jostle.attribute(**(arguments | make()), out=tmp_path / "run", progress=False)
    says(name, str(caught.value), 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["attribute", "calibrate", "exact_influence", "gradient_similarity"])
def test_data_is_as_it_was_when_a_model_that_changes_it_is_refused(way: str) -> None:
    inputs, queries = X.clone(), X[:2].clone()
    posterior = jostle.Posterior(n_beta=8, localization=100)
    calls: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
        "attribute": lambda *of: jostle.attribute(*of, batch_size=8, draws=2, progress=False),
        "calibrate": lambda model, train, _: jostle.calibrate(model, train, progress=False),
        "exact_influence": lambda *of: jostle.attributors.exact_influence(*of, posterior=posterior),
        "gradient_similarity": jostle.attributors.gradient_similarity,
    }
    with pytest.raises(jostle.InputError, match="changes its input"):
        calls[way](ChangesItsInput(), (inputs, Y), (queries, Y[:2]))
    assert torch.equal(inputs, X)
    assert torch.equal(queries, X[:2])


def test_an_output_directory_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(jostle.InputError, match="which exists and holds something else, expected a new or empty"):
        jostle.attribute(model(), (X, Y), (X, Y), draws=2, out=tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", ["notes", "notes/run"], ids=["a file", "under a file"])
def test_an_output_directory_that_cannot_be(place: str, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("plain text")
    with pytest.raises(jostle.InputError, match=r"^out: got .*notes.*(is a file|cannot be written to)"):
        jostle.attribute(model(), (X, Y), (X, Y), draws=2, out=tmp_path / place, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("change", "what", "said"),
    [
        ({"train": (X + 1, Y)}, "train", "other training data"),
        ({"query": (X[:2], 1 - Y[:2])}, "query", "other queries"),
        ({"model": with_weight(0.25)}, "weights", "a model with other weights"),
        ({"seed": 1}, "config", r"other settings \(seed 0 there, 1 now\)"),
        ({"sampling_data": (X[:4], Y[:4])}, "sampling_data", "other sampling data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_of_something_else_is_refused_with_both_fingerprints(
    change: dict[str, Any], what: str, said: str, tmp_path: Path, says: Says
) -> None:
    arguments: dict[str, Any] = {"model": model(), "train": (X, Y), "query": (X[:2], Y[:2]), "draws": 2}
    first = jostle.attribute(**arguments, out=tmp_path / "run", progress=False)
    again = jostle.attribute(**arguments, out=tmp_path / "run", progress=False)  # the same: returned as it is
    assert again.manifest == first.manifest
    stored = first.manifest["fingerprints"][what]
    both = "" if what == "config" else rf" \(fingerprint {stored} there, fingerprint [0-9a-f]{{16}} now\)"
    with pytest.raises(jostle.InputError, match=f"a run of {said}{both}, expected what it began with") as caught:
        jostle.attribute(**(arguments | change), out=tmp_path / "run", progress=False)
    says(f"a run of another {what}", str(caught.value), 2)
    assert jostle.load(tmp_path / "run").manifest == first.manifest


def test_a_run_with_other_random_numbers_is_read_and_not_gone_on_with(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"model": model(), "train": (X, Y), "query": (X[:2], Y[:2]), "progress": False}
    manifest = jostle.attribute(**arguments, draws=2, out=tmp_path / "run").manifest
    assert manifest.pop("randomness") == "SFC64"
    write_manifest(tmp_path / "run", manifest)
    assert jostle.attribute(**arguments, draws=2, out=tmp_path / "run").manifest["draws"] == 2
    with pytest.raises(jostle.InputError, match="random numbers come from Philox, expected SFC64; go on with it in"):
        jostle.attribute(**arguments, draws=3, out=tmp_path / "run")


class Scaled:
    """Looks the same in the configuration, whatever its factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self.factor * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("keep", ["traces", "covariance"])
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"loss": Scaled(1)}, {"loss": Scaled(2)}, r"^loss on train: got other values at w\* than those of the run in"),
        ({"potential_loss": Scaled(1)}, {"potential_loss": Scaled(2)}, r"^potential loss: got other values at w\*"),
        (
            {"posterior": P(n_beta=1, localization=1, weights=lambda name, _: name == "0.bias")},
            {"posterior": P(n_beta=1, localization=1, weights=lambda name, _: name == "2.bias")},
            r"a run of other moving weights \(fingerprint",
        ),
    ],
    ids=["loss", "potential loss", "weights"],
)
def test_a_finished_run_of_another_function_is_not_returned(
    first: dict[str, Any], second: dict[str, Any], message: str, keep: str, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "model": model(), "train": (X, Y), "query": (X[:2], Y[:2]), "draws": 2, "out": tmp_path / "run",
        "progress": False, "keep": keep,
    }  # fmt: skip
    jostle.attribute(**(arguments | first))
    jostle.attribute(**(arguments | first))
    with pytest.raises(jostle.InputError, match=message):
        jostle.attribute(**(arguments | second))


def test_another_observable_is_refused(tmp_path: Path) -> None:
    def run(layer: int) -> None:
        jostle.attribute(
            model(), (X, Y), (X, Y), draws=2, out=tmp_path / "run", progress=False,
            observables={"norm": lambda m: m[layer].weight.norm()[None]},
        )  # fmt: skip

    run(0)
    run(0)
    with pytest.raises(jostle.InputError, match=r"^observable norm: got other values"):
        run(2)


def test_a_start_that_was_cut_off_is_begun_again(tmp_path: Path) -> None:
    """kill −9 while the directory was laid out: what is there is Jostle's own, and of no use."""
    (tmp_path / ".begun").touch()
    (tmp_path / "config.yaml").write_text("half")
    run = jostle.attribute(model(), (X, Y), (X, Y), draws=2, out=tmp_path, progress=False)
    assert run.config["draws"] == 2
    assert not (tmp_path / ".begun").exists()


def test_an_empty_directory_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    jostle.attribute(model(), (X, Y), (X, Y), draws=2, out=tmp_path / "link", progress=False)
    assert (tmp_path / "real" / "manifest.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    jostle.attribute(model(), (X, Y), (X, Y), draws=2, out=".", progress=False)
    assert (tmp_path / "here" / "manifest.json").is_file()


def test_all_chains_failed_and_loaded_again(tmp_path: Path) -> None:
    from jostle.errors import ChainsFailedError

    for keep in ("traces", "covariance"):
        with pytest.raises(ChainsFailedError, match="all 4 chains failed"):
            jostle.attribute(
                model(), (X, Y), (X, Y), draws=20, out=tmp_path / keep, progress=False, keep=keep,
                sampler=S(step_size=1e30), posterior=P(n_beta=1e20, localization=1e-31),
            )  # fmt: skip
        with pytest.raises(ChainsFailedError, match=r"^all 4 chains failed: this run has no scores$"):
            jostle.load(tmp_path / keep).influence()
    with pytest.raises(ChainsFailedError):
        jostle.attribute(
            model(), (X, Y), (X, Y), draws=200, until={"ess": 1e6}, out=tmp_path / "early", progress=False,
            sampler=S(step_size=1e30), posterior=P(n_beta=1e20, localization=1e-31),
        )  # fmt: skip
    assert (jostle.load(tmp_path / "early").stopped or "").endswith("ess unknown of 1e+06, no chain is left")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no readable manifest.json"),
        ("{", "no readable manifest.json"),
        ('{"format": 99}', "got format 99"),
    ],
    ids=["missing", "damaged", "newer"],
)
def test_loading_what_is_not_a_run(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(jostle.InputError, match=message):
        jostle.load(tmp_path)


def test_questions_a_run_cannot_answer() -> None:
    run = jostle.attribute(model(), (X, Y), (X[:2], Y[:2]), draws=3, progress=False)
    with pytest.raises(jostle.InputError, match=r"^train: got one loss a sample, expected per-token losses"):
        run.token_influence(train=0, query=0)
    with pytest.raises(jostle.InputError, match=r"^query: got 2, expected an index below 2"):
        run.influence().top(query=2)
    with pytest.raises(jostle.InputError, match=r"^observable: got 'norm', expected one of \[\]"):
        run.influence(on="norm")
    with pytest.raises(jostle.InputError, match=r"^reduction: got 'max', expected 'mean' or 'sum'"):
        run.influence(reduction="max")  # type: ignore[arg-type]
    with pytest.raises(jostle.InputError, match=r"^centering: got 'chain', expected 'pooled' or 'within'"):
        run.influence(centering="chain")  # type: ignore[arg-type]
    with pytest.raises(jostle.InputError, match=r"^query: got 1.0, expected an index below 2"):
        run.influence().top(query=1.0)  # type: ignore[arg-type]
    with pytest.raises(jostle.InputError, match=r"^path: got s\.csv, expected .*; use export"):
        run.influence().save("s.csv")
    diagnostics = run.diagnostics()
    assert diagnostics["effective_draws"] is None
    assert diagnostics["remarks"] == ["chains of 3 draws are too short to tell how many are effective"]
    with pytest.raises(jostle.InputError, match=r"^posterior_correlation: got covariance scores"):
        _ = run.influence().posterior_correlation
    small = jostle.attribute(model(), (X, Y), (X[:2], Y[:2]), draws=3, keep="covariance", progress=False)
    with pytest.raises(jostle.InputError, match=r"keep='covariance'"):
        small.influence(standard_error=True)
    with pytest.raises(jostle.InputError, match=r"keep='covariance'"):
        _ = small.traces
    with pytest.raises(jostle.InputError, match=r"^centering: got 'chain', expected 'pooled' or 'within'"):
        small.influence(centering="chain")  # type: ignore[arg-type]


def test_a_warning_names_the_line_that_called() -> None:
    run = jostle.attribute(model(), (X, Y), (X[:2], Y[:2]), draws=3, chains=2, progress=False)
    for ask in (run.influence, run.top):  # one warns at once, one by way of the other
        with pytest.warns(EstimateWarning, match="standard errors rest on only") as told:
            ask(standard_error=True)
        assert {warning.filename for warning in told} == {__file__}


def test_what_is_shown_may_come_later(tmp_path: Path) -> None:
    """It changes no draw; what is there is not written over."""
    given = {"draws": 3, "out": tmp_path / "run", "progress": False}
    data = model(), (X, Y), (X[:2], Y[:2])
    before = jostle.attribute(*data, **given).influence().values
    shown = {"train": [{"label": str(label)} for label in Y.tolist()]}
    run = jostle.attribute(*data, **given, examples=shown)
    assert run.examples("train") == shown["train"]
    assert (run.influence().values == before).all()
    with pytest.raises(jostle.InputError, match="images of query of shape"):
        jostle.attribute(*data, **given, examples={"query": [{"image": X[:2].numpy()}, {"image": X[:3].numpy()}]})
    assert not (tmp_path / "run" / "examples" / "query.jsonl").exists()
    other = jostle.attribute(*data, **given, examples={"train": [{"label": "no"}] * 8, "query": [{"text": "a"}] * 2})
    assert other.examples("train") == shown["train"]
    assert other.examples("query") == [{"text": "a"}] * 2


def test_a_run_without_queries(tmp_path: Path) -> None:
    given = {"draws": 3, "out": tmp_path / "run", "observables": {"bias": lambda m: m[0].bias}, "progress": False}
    run = jostle.attribute(model(), (X, Y), None, **given)
    for ask in (run.influence, lambda: run.token_influence(0, 0)):
        with pytest.raises(
            jostle.InputError, match=r"^query: got a run without a query set, expected one; pass on=NAME"
        ):
            ask()
    with pytest.raises(jostle.InputError, match=r"^out: got .*, a run of other queries \(none there, fingerprint"):
        jostle.attribute(model(), (X, Y), (X, Y), **given)


def test_exact_influence_refuses_what_it_cannot_do() -> None:
    posterior = jostle.Posterior(n_beta=8, localization=1)
    with pytest.raises(jostle.InputError, match=r"^weights: got 40,200 moving weights, expected at most 5,000"):
        jostle.attributors.exact_influence(
            nn.Linear(200, 200), (torch.randn(2, 200), torch.zeros(2).long()),
            (torch.randn(2, 200), torch.zeros(2).long()), posterior=posterior,
        )  # fmt: skip
    saddle = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    with pytest.raises(jostle.InputError, match=r"^posterior: got a potential with curvature -.*raise localization"):
        jostle.attributors.exact_influence(
            saddle, (X, Y), (X, Y), posterior=jostle.Posterior(n_beta=1e4, localization=1e-6)
        )
