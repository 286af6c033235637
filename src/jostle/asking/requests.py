"""A command's words turned into a run: flags over a config file over a preset over the defaults."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from jostle import ranks
from jostle.asking.tasks import Task, from_file, language_model, require_device
from jostle.calibration import Calibration, calibrate, rule_for
from jostle.chains.progress import part_of_more
from jostle.chains.thinning import Thinning
from jostle.config import Config, describe
from jostle.diagnose import command
from jostle.errors import InputError
from jostle.files import replace_file
from jostle.models.weights import MovingWeights
from jostle.posterior import Posterior
from jostle.presets import DEFAULTS, IMPLIED, KAPPA, PRESETS, RISE
from jostle.runs.integrity import so_far
from jostle.runs.layout import CALIBRATION, differences, other_run
from jostle.runs.manifest import read_config, read_manifest
from jostle.runs.run import Run
from jostle.runs.sampling import attribute
from jostle.samplers import (
    BAOAB,
    SGLD,
    SGNHT,
    Gaussian,
    LeimkuhlerMatthews,
    OrnsteinUhlenbeck,
    RMSpropSGLD,
    Sampler,
)

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "sgld": SGLD,
    "rmsprop": RMSpropSGLD,
    "rmsprop-devinterp": RMSpropSGLD.devinterp,
    "leimkuhler-matthews": LeimkuhlerMatthews,
    "ornstein-uhlenbeck": OrnsteinUhlenbeck,
    "baoab": BAOAB,
    "sgnht": SGNHT,
    "gaussian": Gaussian,
}
RULES = (SGLD, RMSpropSGLD, LeimkuhlerMatthews, OrnsteinUhlenbeck, BAOAB, SGNHT, Gaussian)
SOURCES = ("model", "train", "query", "sampling", "task", "max_length")
NAMES_SHOWN = 4
KINDS: dict[str, tuple[type, ...]] = {
    "weights": (str, list),
    "sampler": (dict,),
    "max_length": (int,),
    "query": (str, list),
    **dict.fromkeys(("model", "train", "sampling", "task"), (str,)),
}
"""What kind of thing a config file must have where nobody else looks."""
LATER = ("control_variates", "precision", "antithetic", "until", "minutes")
"""Settings that some runs do not have."""
NONE = "none"
"""Lifts --until or --minutes of a config file."""
CALIBRATED_RULE = "baoab"
"""Its covariance has no error of the step, and it forgets in a third of the steps (docs/samplers.md)."""
OF_CALIBRATION = ("sampler", "step_size", "friction", "n_beta", "localization")
"""Settings that say what a calibration is asked for, where they are given; it chooses the others."""


def resolve(
    flags: dict[str, Any], *, config: Path | None = None, preset: str | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Return every setting of a run: what was said on the command line, then elsewhere.

    How many draws a run in ``out`` was asked for is no less said than a preset's number or a default.
    """
    if preset is not None and preset not in PRESETS:
        raise InputError("preset", got=repr(preset), expected=f"one of {', '.join(PRESETS)}")
    request = DEFAULTS | (PRESETS[preset] if preset else {}) | (_asked_for(out) if out else {})
    request |= _from_config(config) if config else {}
    request |= IMPLIED.get(flags.get("sampler", ""), {}) | flags
    if flags.get("sampler") == "gaussian" and "step_size" in flags:
        raise InputError("step_size", got=f"{flags['step_size']:g}", expected="none: every step of gaussian draws anew")
    request["thin"] = _thin(request["thin"])
    if "until" in flags:  # words; a config file has names and numbers
        request["until"] = _until(flags["until"])
    if "minutes" in flags:
        request["minutes"] = _minutes(flags["minutes"])
    if "task" in request and "model" in request:
        raise InputError("task", got="a model as well", expected="either --task or --model")
    needed = () if "task" in request else ("model", "train", "query")
    missing = [f"--{name}" for name in needed if name not in request]
    if missing:
        raise InputError("run", got=f"no {', no '.join(missing)}", expected="--model, --train and --query, or --task")
    return request


def _asked_for(out: Path) -> dict[str, Any]:
    """How many draws the run in a directory is to have, and when it is to stop, where there is one."""
    there = read_config(out) if (out / "manifest.json").is_file() else {}
    return {name: there[name] for name in ("chains", "draws", "until", "minutes") if there.get(name) is not None}


def _thin(word: Any) -> int | Literal["auto"]:
    if word == "auto":
        return "auto"
    if not isinstance(word, str):
        return word
    try:
        return int(word)
    except ValueError as error:
        raise InputError("thin", got=repr(word), expected="a whole number or auto") from error


def _until(words: list[str]) -> dict[str, float] | None:
    """``ess=400`` and the like as names and numbers; none where a config file's are not to count."""
    return None if words == [NONE] else dict(map(_criterion, words))


def _criterion(word: str) -> tuple[str, float]:
    """``ess=400`` as a name and a number."""
    name, _, value = word.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        several = len(re.findall(r"\b(?:ess|error)=", word)) > 1
        raise InputError(
            "until",
            got=repr(word),
            expected=f"ess=400, for one, or error=0.05, or {NONE}",
            fix="for both, give --until twice: --until ess=400 --until error=0.05" if several else "",
        ) from error


def _minutes(word: str) -> float | None:
    try:
        return None if word == NONE else float(word)
    except ValueError as error:
        raise InputError("minutes", got=repr(word), expected=f"a number or {NONE}") from error


def _from_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        posterior, sampler = config["posterior"], config["sampler"]
        settings = {name: config[name] for name in ("chains", "draws", "burn_in", "thin", "batch_size", "seed", "keep")}
        settings |= {name: posterior[name] for name in ("n_beta", "localization", "prior_precision", "weights")}
        # What came later than some runs, or is not part of every rule.
        settings |= {name: config[name] for name in LATER if config.get(name) is not None}
        settings |= {name: sampler[name] for name in ("step_size",) if name in sampler}
        settings |= {"sampler": sampler} | {
            name: config["source"][name] for name in SOURCES if name in config["source"]
        }
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            "config",
            got=f"{path}, which lacks what repeats a run ({type(error).__name__}: {str(error).splitlines()[0]})",
            expected="the config.yaml of a run that the command line made",
        ) from error
    for name, kinds in KINDS.items():
        given = settings.get(name, "")
        parts = given if isinstance(given, list) else []
        if name in settings and not (isinstance(given, kinds) and all(isinstance(part, str) for part in parts)):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise InputError("config", got=f"{name} {settings[name]!r} in {path}", expected=f"a {expected}")
    return settings


def sampler_of(request: Mapping[str, Any]) -> Sampler:
    """Return the update rule of a request."""
    chosen, step_size = request["sampler"], request["step_size"]
    if isinstance(chosen, dict):  # from a config file, with all its settings
        by_name = {rule.__name__: rule for rule in RULES}
        settings = {name: value for name, value in chosen.items() if name != "name"}
        if "step_size" in settings:
            settings["step_size"] = step_size
        try:
            rule = by_name[chosen["name"]](**settings)
        except (KeyError, TypeError) as error:
            raise InputError("sampler", got=f"{chosen} in a config", expected="a rule and its settings") from error
        return _with_friction(rule, request)
    if chosen not in SAMPLERS:
        raise InputError("sampler", got=repr(chosen), expected=f"one of {', '.join(SAMPLERS)}")
    return _with_friction(Gaussian() if chosen == "gaussian" else SAMPLERS[chosen](step_size=step_size), request)


def _with_friction(sampler: Sampler, request: Mapping[str, Any]) -> Sampler:
    if "friction" not in request:
        return sampler
    if not isinstance(sampler, BAOAB | SGNHT):
        raise InputError(
            "friction",
            got=f"{request['friction']:g} for {type(sampler).__name__}, which has none",
            expected="--sampler baoab or sgnht",
        )
    return replace(sampler, friction=request["friction"])


def of_run(out: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of the run in a directory, with more chains, draws or queries where these are asked for."""
    manifest, there = read_manifest(out), read_config(out)
    if "source" not in there:
        raise InputError(
            "run",
            got=f"{out}, made from Python: its config.yaml names neither model nor data",
            expected="a run that the command line made",
            fix=f"call jostle.attribute again with the same arguments and out={str(out)!r}, and it goes on",
        )
    counts = {name: changes[name] for name in ("chains", "draws") if changes and name in changes}
    _refuse_to_extend(out, there, counts)
    for name, wanted in counts.items():
        if wanted < there[name]:
            raise InputError(name, got=f"{wanted} for {out}, which has {there[name]}", expected="more, in all")
    flags = {name: value for name, value in (changes or {}).items() if value is not None}
    if "query" in flags:
        flags["query"] = _more_queries(there["source"], flags["query"])
    device = manifest.get("device")
    if ranks.several() and device:
        device = device.partition(":")[0]  # the number is that of rank 0's; every rank has its own
    return resolve({"device": device} | flags, config=out / "config.yaml")


def _refuse_to_extend(out: Path, there: Mapping[str, Any], more: Mapping[str, float]) -> None:
    """Refuse more chains or draws of a run that stops by itself, and say how another one gets them."""
    stops = [f"--{name}" for name in ("until", "minutes") if there.get(name)]
    if stops and more:
        another = command(there, {"settings": more}, out)
        raise InputError(
            "out",
            got=f"{out}, a run that stops by itself ({' and '.join(stops)})",
            expected="another one: where its rounds end depends on draws, so it is not extended",
            fix=another or "choose another directory",
        )


def _more_queries(source: Mapping[str, Any], added: list[str]) -> list[str]:
    """The queries that a run has and those it is to have; one that is among them already is not added again."""
    if "query" not in source:
        raise InputError(
            "query",
            got=f"{', '.join(added)} for a run of a task",
            expected="queries from its build()",
            fix="let it return more, after those that are there, and jostle resume adds them",
        )
    there = source["query"] if isinstance(source["query"], list) else [source["query"]]
    return list(dict.fromkeys([*there, *map(_absolute, added)]))


def asked_of_calibration(
    sampler: Any, given: Mapping[str, Any], *, rise: float | None = None, kappa: float | None = None
) -> dict[str, Any]:
    """Return what a calibration is asked for, in one form however it is said; refuses what nothing would heed."""
    friction = {name: given[name] for name in ("friction",) if name in given}
    rule = rule_for(
        sampler_of({"sampler": sampler, "step_size": 1.0} | friction),
        rise=rise,
        kappa=kappa,
        **{name: given[name] for name in ("localization", "n_beta") if name in given},
    )
    control = isinstance(rule, Gaussian)
    settings = {name: value for name, value in vars(rule).items() if name != "step_size"}
    asked: dict[str, Any] = {"sampler": {"name": type(rule).__name__, **settings}}
    if "localization" not in given:
        asked["rise"] = RISE if rise is None else rise
    if "n_beta" not in given and not control:
        asked["kappa"] = KAPPA if kappa is None else kappa
    kept = ("localization",) if control else ("localization", "n_beta", "step_size")
    return asked | {name: given[name] for name in kept if name in given}


def given_again(
    out: Path, given: Mapping[str, Any], *, config: Path | None, rise: float | None, kappa: float | None
) -> dict[str, Any]:
    """Return what counts of the flags for a run that --auto began: all but what the calibration was asked for.

    Refuses a run that was calibrated for something else.
    """
    try:
        kept = json.loads((out / CALIBRATION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "auto",
            got=f"{out}, a run begun without it",
            expected="what it began with",
            fix="choose another directory, or leave --auto out",
        ) from error
    sampler = given.get("sampler", _from_config(config)["sampler"] if config else CALIBRATED_RULE)
    now = asked_of_calibration(sampler, given, rise=rise, kappa=kappa)
    there = kept.get("asked", now) if isinstance(kept, dict) else now
    changed = differences(there, now, absent="not asked for")
    if changed:
        raise other_run(out, changed)
    return {name: value for name, value in given.items() if name not in OF_CALIBRATION}


def calibrated(
    request: dict[str, Any],
    given: Mapping[str, Any],
    *,
    rise: float | None = None,
    kappa: float | None = None,
    keep: Path | None = None,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Calibration, Task]:
    """Choose what was not given on the command line, and return it with the reasons and the loaded task."""
    if "sampler" not in given and not isinstance(request["sampler"], dict):
        request = request | {"sampler": CALIBRATED_RULE}
    asked = asked_of_calibration(request["sampler"], given, rise=rise, kappa=kappa)
    _settings(request)
    task = task_of(request)
    sampler = sampler_of(request)
    options = {name: task.options[name] for name in ("potential_loss", "collate") if name in task.options}
    sampling_data = task.options.get("sampling_data", task.sampling_data)
    chosen = calibrate(
        task.model,
        task.train,
        task.query,
        loss=task.loss,
        sampling_data=sampling_data,
        weights=request.get("weights", task.default_weights),
        sampler=sampler,
        rise=rise,
        kappa=kappa,
        **{name: given[name] for name in ("localization", "n_beta", "step_size") if name in given},
        **{name: request[name] for name in ("batch_size", "seed")},
        **{name: request[name] for name in ("control_variates", "precision") if name in request},
        **options,
        keep=keep,
        say=say,
    )
    if keep is not None:  # for whoever asks for the same run, or another one, later
        replace_file(keep, json.dumps(json.loads(keep.read_text()) | {"asked": asked}, indent=1))
    settings: dict[str, Any] = {
        "n_beta": chosen.posterior.n_beta,
        "localization": chosen.posterior.localization,
        "weights": chosen.posterior.weights,
        "prior_precision": 0.0,
        "burn_in": chosen.burn_in,
        "thin": chosen.thin,
        "sampler": {"name": type(chosen.sampler).__name__, **vars(chosen.sampler)},
        "step_size": getattr(chosen.sampler, "step_size", None),
    }
    # The pilot has measured what --thin auto would measure again.
    kept = {name: request[name] for name in ("burn_in", "thin") if name in given and request[name] != "auto"}
    return request | settings | kept, chosen, task


def to_config(request: dict[str, Any], task: Task) -> dict[str, Any]:
    """Return a request as the config.yaml of its run would have it."""
    config = replace(
        _settings(request),
        posterior=_posterior(request, task.default_weights),
        loss=describe(task.loss),
        potential_loss=describe(task.options.get("potential_loss", task.loss)),
        observables=tuple(task.options.get("observables", ())),
    )
    return config.to_dict() | {"source": source_of(request)}


def _settings(request: Mapping[str, Any]) -> Config:
    """A request without what it names; refuses numbers that no run can have before anything is loaded for them."""
    return Config(
        posterior=_posterior(request, "all"),
        sampler=sampler_of(request),
        loss="",
        potential_loss="",
        observables=(),
        keep="traces",
        thin=1 if request["thin"] == "auto" else request["thin"],
        **{name: request[name] for name in ("chains", "draws", "burn_in", "batch_size", "seed")},
        **{name: request[name] for name in LATER if name in request},
    )


def carry_out(
    request: dict[str, Any],
    out: Path,
    *,
    say: Callable[[str], None],
    task: Task | None = None,
    dry_run: Callable[[list[str]], None] | None = None,
) -> Run:
    """Load what the request names, if it is not loaded yet, say what will move, and sample."""
    sampler = _settings(request).sampler
    task = task or task_of(request)
    posterior = _posterior(request, task.default_weights)
    moving = MovingWeights(task.model, posterior.weights)
    shown = ", ".join(moving.names[:NAMES_SHOWN]) + (", ..." if len(moving.names) > NAMES_SHOWN else "")
    say(f"{moving.total:,} weights of {len(moving.names)} parameters move ({posterior.weights}): {shown}")
    del moving
    before = Run(out) if (out / "manifest.json").is_file() else None
    if before is not None:
        _tell_what_is_there(before, request, say)
    queries = 0 if before is None else _queries(before)
    options = {"sampling_data": task.sampling_data, **task.options}
    with part_of_more():
        run = attribute(
            task.model,
            task.train,
            task.query,
            loss=task.loss,
            posterior=posterior,
            sampler=sampler,
            out=out,
            source=source_of(request),
            examples=task.examples,
            dry_run=dry_run,
            **{name: request[name] for name in ("chains", "draws", "burn_in", "thin", "batch_size", "seed")},
            **{
                name: request[name]
                for name in (*LATER, "compile", "keep_weights", "shards", "traces")
                if name in request
            },
            **options,
        )
    if before is not None and _queries(run) > queries:
        say(f"{_queries(run) - queries} queries added to the {queries} that were there")
    if run.manifest.get("thinning") and (before is None or before.manifest["status"] == "sampling"):
        say(str(Thinning(**run.manifest["thinning"])))
    if before is not None and before.manifest == run.manifest:
        more = "" if run.stopped else f"; jostle extend {out} --draws N adds draws, up to N of each chain"
        say(f"{out} is complete, with {run.config['chains']} × {run.draws} draws{more}")
    return run


def _tell_what_is_there(run: Run, request: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say what a run has before it goes on or is added to."""
    there = run.manifest.get("planned", {})
    asked = {name: request[name] for name in ("chains", "draws")}
    more = {name: count for name, count in asked.items() if there.get(name, count) < count}
    _refuse_to_extend(run.directory, run.config, more)
    if run.manifest["status"] != "complete":
        say(f"{run.directory} has {so_far(run)}, and goes on")
        return
    if more:
        say(
            f"{run.directory} has {there['chains']} × {there['draws']} draws: added are those up to "
            f"{request['chains']} × {request['draws']}"
        )


def _queries(run: Run) -> int:
    """How many queries a run has that are observed at all of its draws."""
    if run.config["keep"] != "traces" or "query" not in run.traces.sets:
        return 0
    return run.manifest.get("widening", {}).get("queries", run.traces.columns("query").samples)


def _posterior(request: Mapping[str, Any], default_weights: str) -> Posterior:
    return Posterior(
        n_beta=request["n_beta"],
        localization=request["localization"],
        prior_precision=request.get("prior_precision", 0.0),
        weights=request.get("weights", default_weights),
    )


def source_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the model and the data of a request come from, as full paths."""
    named = {name: _absolute(request[name]) for name in SOURCES if name in request}
    if isinstance(named.get("query"), list):
        queries = [*map(_absolute, named["query"])]
        named["query"] = queries[0] if len(queries) == 1 else queries
    return named


def task_of(request: Mapping[str, Any]) -> Task:
    """Load the model and the data that a request names."""
    require_device(request.get("device"))
    # A model that is to be spread over GPUs comes from the memory of the host.
    spread = request.get("shards", 1) > 1
    if "task" in request:
        return from_file(request["task"], None if spread else request.get("device"))
    with without_loading_bars():
        return language_model(
            request["model"],
            train=request["train"],
            query=request["query"],
            sampling=request.get("sampling"),
            max_length=request.get("max_length"),
            device=request.get("device"),
            spread=spread,
        )


@contextlib.contextmanager
def without_loading_bars() -> Iterator[None]:
    """Have transformers load weights without a progress bar; downloads, which do take time, keep theirs."""
    bars = importlib.import_module("transformers.utils.logging") if importlib.util.find_spec("transformers") else None
    if bars is None or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    importlib.import_module("huggingface_hub.utils").enable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _absolute(value: Any) -> Any:
    """A local path in full, so that the run can be repeated from anywhere."""
    place, colon, rest = str(value).partition(":")
    return str(Path(place).resolve()) + colon + rest if isinstance(value, str) and Path(place).exists() else value
