"""The verdict: the numbers against the thresholds, in words, with what to do."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jostle.diagnose.measures import last_step, memory_in_steps
from jostle.diagnose.thresholds import (
    AGREEMENT_AIM,
    AGREEMENT_DOUBTFUL,
    AGREEMENT_UNRELIABLE,
    DRIFT_ERRORS,
    ENOUGH_DRAWS,
    FAR_TOO_HOT,
    FEWEST_EFFECTIVE,
    HARDLY_RISEN,
    HOT,
    HOT_AT_ONCE,
    HOT_ERRORS,
    MOST_TIMES_THE_DRAWS,
    R_HAT_DOUBTFUL,
    R_HAT_UNRELIABLE,
    RISE_DOUBTFUL,
    RISE_UNRELIABLE,
    TOO_HOT,
)
from jostle.estimate import FEWEST_DRAWS
from jostle.presets import RISE

Level = Literal["good", "doubtful", "unreliable"]
LEVELS: tuple[Level, ...] = ("good", "doubtful", "unreliable")


@dataclass(frozen=True)
class Reason:
    """One thing that is wrong: how bad, what was measured, and what to do about it."""

    level: Level
    kind: str
    number: float | None
    finding: str
    advice: str
    settings: Mapping[str, float] = field(default_factory=dict)
    """What the advice comes to, as settings of a run."""


def judge(config: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The worst level of all reasons, and the reasons, causes before what follows from them."""
    reasons = list(_reasons(config, found))
    level = LEVELS[max((LEVELS.index(reason.level) for reason in reasons), default=0)]
    return {
        "level": level,
        "summary": _summary(level, reasons, found),
        "reasons": [asdict(reason) for reason in reasons],
        "hint": _hint(config, reasons, found),
        "settings": _together([reason.settings for reason in reasons]),
    }


def in_python(advice: str) -> str:
    """Name arguments as Python does, instead of the flags of the command line."""
    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", lambda flag: flag[1].replace("-", "_"), advice)


def _hint(config: Mapping[str, Any], reasons: list[Reason], found: Mapping[str, Any]) -> str | None:
    """What a run that is nothing worse than timid, or bold, could do."""
    told = {reason.kind for reason in reasons}
    rise = found.get("rise")
    if rise is None or told & {"no movement", "hardly left w*", "runaway", "too hot", "left the neighbourhood"}:
        return None
    best, auto = "scores were best some tenths of a nat away", f"jostle run --auto chooses settings for {RISE:g}"
    if abs(rise) < HARDLY_RISEN:
        return f"the chains hardly moved: the mean loss is {rise:+.1g} nats from its value at w*, and {best}; {auto}"
    if rise > RISE_DOUBTFUL:
        # Of a quadratic loss the rise is tr(H)/2γ.
        nearer = _two_digits(config["posterior"]["localization"] * rise / RISE)
        return (
            f"the chains went far: the mean loss is {rise:+.2g} nats from its value at w*, and {best}; {auto} "
            f"(if the loss were quadratic, --localization {nearer})"
        )
    return None


def _together(advised: list[Mapping[str, float]]) -> dict[str, float]:
    """All advice at once: the smallest step, and the most of everything else."""
    found: dict[str, float] = {}
    for settings in advised:
        for name, value in settings.items():
            pick = min if name == "step_size" else max
            found[name] = pick(found.get(name, value), value)
    return found


def command(config: Mapping[str, Any], verdict: Mapping[str, Any], out: Path) -> str | None:
    """What to type to follow the advice of a verdict: more of the same run or, with other settings, another one."""
    settings = verdict["settings"]
    if not settings or "source" not in config:
        return None
    flags = " ".join(f"{_flag(name)} {value:.15g}" for name, value in settings.items())
    # A run that stops by itself has had what it wanted, and takes no more draws; another one would stop there, too.
    stops = [f"--{name} none" for name in ("until", "minutes") if config.get(name)]
    if settings.keys() <= {"draws", "chains"} and not stops:
        return f"jostle extend {shlex.quote(str(out))} {flags}"
    if "draws" in settings:
        flags = " ".join([flags, *stops])
    number = next(number for number in itertools.count(2) if not Path(f"{out}-{number}").exists())
    places = [shlex.quote(f"{out}-{number}"), "--config", shlex.quote(str(out / "config.yaml"))]
    return f"jostle run {' '.join(places)} {flags}"


def _summary(level: Level, reasons: list[Reason], found: Mapping[str, Any]) -> str:
    if level == "good":
        effective, halves, top = found["effective_draws"], found["agreement"]["halves"], found["agreement"]["top"]
        settled = halves["spearman"] >= AGREEMENT_DOUBTFUL
        return (
            f"good{'' if settled else ' for the strongest scores'}: {effective:.0f} effective draws (± "
            f"{effective**-0.5:.2f} on a correlation), "
            f"R-hat {max(found['losses']['r_hat'], found['products']['r_hat']):.2f}, halves of the draws agree on "
            f"{halves['top_overlap']:.0%} of the {top} most helpful and by {halves['spearman']:.2f} in all (Spearman)"
        )
    worst = next(reason for reason in reasons if reason.level == level)
    opening = "doubtful" if level == "doubtful" else "these scores are not reliable"
    return f"{opening}: {worst.finding}; {worst.advice}"


def _reasons(config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Reason]:
    failed, chains = found["failed_chains"], found["chains"]
    step_size = config["sampler"].get("step_size")
    heat = found.get("temperature", {}).get("value") or 0.0
    times = 16 if heat > FAR_TOO_HOT else 8 if heat > TOO_HOT else 4
    smaller = f"lower --step-size (to about {_two_digits(step_size / times)})" if step_size else ""
    nearer = f"{smaller} or raise --localization" if step_size else "raise --localization"  # some rules have no step
    shorter = _set(step_size=step_size / times) if step_size else {}
    for failure in failed:
        yield Reason(
            "unreliable" if 2 * len(failed) >= config["chains"] else "doubtful",
            "failed chain",
            failure["step"],
            f"chain {failure['chain']} failed at step {failure['step']}: {failure['reason']}",
            f"{nearer}: the chains that are left stand at the same brink" if chains else nearer,
            shorter,
        )
    if chains == 0:
        return
    if found.get("unmoved_share") == 1:
        yield Reason(
            "unreliable",
            "no movement",
            0.0,
            "no loss moved by more than rounding",
            "raise --step-size, or lower --localization",
        )
        return
    unstable = False
    for reason in _unstable(config, found, chains, smaller or nearer, nearer, shorter):
        unstable = True
        yield reason
    if "unknown" in found:
        yield _without_traces(found)
        return
    # What an unstable chain lacks is a smaller step: neither burn-in nor thinning nor more draws would help it.
    if not unstable:
        short = list(_too_short(config, found))
        yield from short
        few = next((reason.advice for reason in short if reason.kind == "few effective draws"), None)
        yield from _disagreement(config, found, few)
    if chains == 1:
        yield Reason(
            "doubtful",
            "few chains",
            chains,
            "a single chain (or antithetic pair) cannot show that it missed something",
            "sample with --chains 4",
            _set(chains=4),
        )


def _unstable(
    config: Mapping[str, Any],
    found: Mapping[str, Any],
    chains: int,
    smaller: str,
    nearer: str,
    shorter: Mapping[str, float],
) -> Iterator[Reason]:
    """Chains that left, or are leaving, what they should sample."""
    away = found.get("runaway", {}).get("chains", [])
    if away:
        trail = found["runaway"]
        where = f"{trail['level']:.4g} at the end, around {trail['before']:.4g} in the first half"
        if 2 * len(away) >= chains:
            finding = f"the mean loss grows without end (mean loss {where}): the step size is too large to be stable"
        else:
            finding = f"chain {_listed(away)} runs away late (mean loss {where})"
        yield Reason("unreliable", "runaway", trail["excess"], finding, smaller, shorter)
    else:
        yield from _heated(config, found, smaller, shorter)
    rise, center = found["rise"], abs(found["mean_loss_at_center"] or 0.0)
    if rise > max(RISE_DOUBTFUL, center / 2):
        yield Reason(
            "unreliable" if rise > max(RISE_UNRELIABLE, 2 * center) else "doubtful",
            "left the neighbourhood",
            rise,
            f"the mean loss is {rise:.3g} nats above w*: the chain left the neighbourhood",
            nearer,
            shorter,
        )


def _heated(
    config: Mapping[str, Any], found: Mapping[str, Any], smaller: str, shorter: Mapping[str, float]
) -> Iterator[Reason]:
    """Chains that sample a hotter target than theirs, by `jostle.chains.thermometer`."""
    heat, error = found["temperature"]["value"], found["temperature"]["standard_error"]
    if heat is None:
        return
    if error is None:
        hot, size = (found["temperature"]["coolest_chain"] or 0.0) > HOT_AT_ONCE, f"some {_two_digits(heat)}"
    else:
        hot, size = heat > max(HOT, 1 + HOT_ERRORS * error), f"{heat:.3g} ± {error:.1g}"
    if hot:
        small = found["sampled_from"] is None or config["batch_size"] < found["sampled_from"]
        advice, settings = smaller, shorter
        if shorter:
            # A draw is worth as much after shorter steps where there are as many more of them before it.
            before, after = (
                memory_in_steps({**config, "sampler": {**config["sampler"], **step}}) for step in ({}, shorter)
            )
            slower = after / before if before and after else config["sampler"]["step_size"] / shorter["step_size"]
            longer = {name: slower * config[name] for name in ("thin", "burn_in") if config[name]}
            advice = ", ".join([smaller, *(f"{_flag(name)} {_two_digits(value)}" for name, value in longer.items())])
            settings = {**shorter, **_set(**longer)}
        if small:
            # What the noise of batches adds falls at least in proportion to their size. Whether it is the noise, nobody
            # can tell from the heat: shorter steps help in either case, and they are what the command has.
            advice += "; or, if it is the noise, raise --batch-size"
            if found["sampled_from"] is not None:
                enough = min(2 * config["batch_size"] * (heat - 1) / (HOT - 1), found["sampled_from"])
                advice += f" (to about {_two_digits(enough)})"
        yield Reason(
            "unreliable" if heat > TOO_HOT else "doubtful",
            "too hot",
            heat,
            f"the chains are {size} times as hot as what they should sample: the "
            f"step{' or the noise of small batches' if small else ''} heats them",
            advice,
            settings,
        )


def _too_short(config: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Reason]:
    """Chains that have not gone far enough: R-hat, drift, effective draws."""
    effective, draws, thin = found["effective_draws"], config["draws"], config["thin"]
    total = found["chains"] * draws
    if found.get("unmoved_queries") == 1:
        yield Reason(
            "unreliable",
            "no query moved",
            0.0,
            "no query's loss moved by more than rounding",
            "move other --weights, lower --localization, or ask of queries that the model is less sure of",
        )
        return
    if effective is None:
        yield Reason(
            "unreliable" if total < FEWEST_EFFECTIVE else "doubtful",
            "too few draws",
            draws,
            f"chains of {draws} draws are too short to tell how many are effective",
            f"raise --draws to {ENOUGH_DRAWS} or more",
            _set(draws=ENOUGH_DRAWS),
        )
        return
    # Chains that disagree need the slower of both times: their own, and the one that their disagreement shows.
    slowest = max(found["autocorrelation_time"], total / effective)
    steps, memory = last_step(config), memory_in_steps(config)
    longer = max(config["burn_in"] + 3 * slowest * thin, 3 * memory if memory else 0)
    burn_in = _two_digits(longer)
    reasons = []
    r_hat = max(found["losses"]["r_hat"], found["products"]["r_hat"], found["mean_loss_series"]["r_hat"] or 1)
    # Halves of a few draws differ by chance.
    disagree = r_hat > R_HAT_DOUBTFUL and draws >= 4 * FEWEST_DRAWS
    moved = found["drift"]
    drifts = moved["standard_errors"] is not None and abs(moved["standard_errors"]) > DRIFT_ERRORS
    left = memory is None or steps >= memory
    if effective < ENOUGH_DRAWS:
        # Draws that are one autocorrelation time apart are worth about three quarters of independent ones.
        enough = ENOUGH_DRAWS / 0.75
        more = total * enough / effective
        # Chains that have arrived need nothing but draws. Where these are no more than another run would have, with as
        # many steps between them as it takes, they cost less than it does.
        if slowest <= 2 or (left and not disagree and not drifts and more - total <= max(total, enough)):
            advice = [f"raise --draws to {_two_digits(more / found['chains'])}"]
            settings = _set(draws=more / found["chains"])
        else:
            wanted = max(thin * slowest, memory if memory and memory > steps else 0)
            roughly = "at least" if effective < 5 * found["chains"] else "about"
            advice, settings = [f"raise --thin to {roughly} {_two_digits(wanted)}"], _set(thin=wanted)
            if total < enough:
                advice.append(f"raise --draws to {_two_digits(enough / found['chains'])}")
                settings |= _set(draws=enough / found["chains"])
        reasons.append(
            Reason(
                "unreliable" if effective < FEWEST_EFFECTIVE else "doubtful",
                "few effective draws",
                effective,
                f"{effective:.0f} effective draws of {found['chains']} × {draws} "
                f"(± {effective**-0.5:.2f} on a correlation)",
                " and ".join(advice),
                settings,
            )
        )
    if disagree:
        reasons.append(
            Reason(
                "unreliable" if r_hat > R_HAT_UNRELIABLE else "doubtful",
                "chains disagree",
                r_hat,
                f"chains disagree with each other or with themselves (R-hat {r_hat:.2f})",
                f"raise --burn-in to about {burn_in}, and --thin",
                _set(burn_in=longer, thin=max(thin * slowest, 2 * thin)),
            )
        )
    slow = max(("losses", "products"), key=lambda name: found[name]["slow_share"])
    worst = found[slow]
    if not reasons and worst["slow_share"] and draws >= 4 * FEWEST_DRAWS:
        what = "losses" if slow == "losses" else "scores"
        wanted = thin * total / max(worst["ess_bulk_min"], 1.0)
        reasons.append(
            Reason(
                "doubtful",
                "some are slow",
                worst["slow_share"],
                f"{worst['slow_share']:.0%} of the {what} have not converged, where the others have (worst R-hat "
                f"{worst['r_hat_max']:.2f}, {worst['ess_bulk_min']:.0f} effective draws): these are not reliable",
                f"raise --thin to about {_two_digits(wanted)} for them",
                _set(thin=wanted, burn_in=config["burn_in"] + 3 * wanted),
            )
        )
    tokens = max((found[name]["r_hat"] or 1.0 for name in ("tokens", "token_products") if name in found), default=1.0)
    if not reasons and tokens > R_HAT_UNRELIABLE and draws >= 4 * FEWEST_DRAWS:
        reasons.append(
            Reason(
                "doubtful",
                "tokens disagree",
                tokens,
                f"single tokens have not converged (R-hat {tokens:.2f}); scores of whole sequences have",
                f"raise --burn-in to about {burn_in}, and --thin, before reading single tokens",
                _set(burn_in=longer, thin=2 * thin),
            )
        )
    if drifts:
        direction = "rises" if moved["change"] > 0 else "falls"
        reasons.append(
            Reason(
                "doubtful",
                "drift",
                moved["standard_errors"],
                f"the mean loss still {direction} along the chains (by {abs(moved['change']):.2g} nats, "
                f"{abs(moved['standard_errors']):.0f} standard errors)",
                f"raise --burn-in to about {burn_in}",
                _set(burn_in=longer),
            )
        )
    # By itself it is no reason: where curvature holds every direction that matters, chains forget sooner.
    if reasons and memory is not None and not left:
        yield Reason(
            "unreliable",
            "hardly left w*",
            steps / memory,
            f"chains have hardly left w*: {steps} steps, and forgetting it takes up to {memory:.3g}",
            f"raise --thin to about {_two_digits(memory)}, or take longer steps",
            _set(thin=memory),
        )
    yield from reasons


def _disagreement(config: Mapping[str, Any], found: Mapping[str, Any], few: str | None) -> Iterator[Reason]:
    """Halves that rank differently; ``few`` is what whoever has few effective draws is told already."""
    agreement = found["agreement"]
    if agreement["halves"]["spearman"] is None and found["effective_draws"] is not None:
        yield Reason(
            "doubtful",
            "too few to rank",
            agreement["examples"],
            f"{agreement['examples']} training examples that move are too few to tell whether halves of the draws rank "
            "them alike",
            "attribute to more of them, or look at --error of each score",
        )
        return
    for name, what in (("halves", "the first and the last half of the draws"), ("chains", "two halves of the chains")):
        between = agreement[name]
        rank = between["spearman"]
        if rank is None:
            continue
        # Where most scores are near 0 their order is noise, and the few that are not may be sure all the same.
        chance = agreement["top"] / agreement["examples"]
        helpful, harmful = (
            (between[overlap] - chance) / (1 - chance) for overlap in ("top_overlap", "harmful_overlap")
        )
        shared = f"{between['top_overlap']:.0%} of the {agreement['top']} most helpful in common"
        if rank >= AGREEMENT_DOUBTFUL or min(helpful, harmful) >= AGREEMENT_DOUBTFUL:
            continue
        if helpful >= AGREEMENT_DOUBTFUL:
            finding = (
                f"{what} have {shared}, but {between['harmful_overlap']:.0%} of the most harmful, and rank the rest "
                f"differently (Spearman {rank:.2f})"
            )
            advice, settings = _more_draws(config, found, max(rank, harmful), few)
            advice = f"trust the most helpful ones alone, or {advice}"
            yield Reason("doubtful", "only the most helpful", rank, finding, advice, settings)
            return
        agreed = max(rank, helpful)
        advice, settings = _more_draws(config, found, agreed, few)
        yield Reason(
            "unreliable" if agreed < AGREEMENT_UNRELIABLE else "doubtful",
            "scores disagree",
            rank,
            f"{what} rank training examples differently (Spearman {rank:.2f}; {shared})",
            advice,
            settings,
        )
        return


def _more_draws(
    config: Mapping[str, Any], found: Mapping[str, Any], agreed: float, few: str | None
) -> tuple[str, Mapping[str, float]]:
    """What would bring halves that agree by so much up to the threshold."""
    # Spearman and Brown's formula: how many times the draws would do it, and not by a hair.
    factor = AGREEMENT_AIM / (1 - AGREEMENT_AIM) * (1 - agreed) / max(agreed, 0.01)
    if few is not None or found["effective_draws"] is None:
        return few or "get more effective draws", {}
    if factor > MOST_TIMES_THE_DRAWS:
        return "lower --localization or move other --weights, rather than draw more: their scores hardly differ", {}
    return f"raise --draws to about {_two_digits(config['draws'] * factor)}", _set(draws=config["draws"] * factor)


def _without_traces(found: Mapping[str, Any]) -> Reason:
    effective, share = found["effective_draws_by_share"], found["between_chain_share"]
    hint = (
        "" if effective is None else f"; {share:.2g} of the variance lies between chains, as with about {effective:.0f}"
    )
    few = effective is not None and effective < FEWEST_EFFECTIVE
    return Reason(
        "unreliable" if few else "doubtful",
        "no traces",
        effective,
        f"without traces nobody can tell how many draws are effective{hint}",
        "sample with keep='traces', if only for a short run at the same settings",
    )


def _two_digits(value: float) -> str:
    """A number to set: rounded up to two digits, so that nobody takes it for exact."""
    if value <= 0 or not math.isfinite(value):
        return "more"
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    rounded = math.ceil(value / unit - 1e-9) * unit
    return f"{rounded:.2g}" if rounded < 1 else f"{math.ceil(rounded - 1e-9):d}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _set(**settings: float) -> dict[str, float]:
    """Settings to the two digits that are shown of them; none where there is no number to show."""
    rounded = {name: _two_digits(value) for name, value in settings.items()}
    return {name: float(value) for name, value in rounded.items() if value != "more"}


def _listed(chains: list[int]) -> str:
    return " and ".join(map(str, chains))
