"""Do words that belong together move together? The benchmark behind `jostle demo`, over several seeds of the sampling.

    python -m experiments.bilingual                                        # writes experiments/records/bilingual.json
    python -m experiments.bilingual --model DIR --corpus 1 --record FILE    # another corpus

For each word of the queries, all other words are ranked by their mean posterior correlation with it: the mean
reciprocal rank of the first partner (translation, synonym, the same number), and the share of the nearest five that are
of its category. Beside it: gradient similarity with respect to the same weights, exactly; the same words shuffled; a
method that sees identity alone; and the sampler without its gradient (n_beta = 0), with the same number of draws.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.environment import write_record

from jostle.demo import language, recovery
from jostle.posterior import Posterior
from jostle.samplers import SGLD

RECORD = Path(__file__).parent / "records" / "bilingual.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Do words that belong together move together?")
    parser.add_argument("--model", type=Path, default=language.MODEL)
    parser.add_argument("--corpus", type=int, default=language.CORPUS_SEED, help="the seed of the model's corpus")
    parser.add_argument("--settings", default=None, help="n_beta,localization,step·localization;...")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--draws", type=int, default=language.DRAWS)
    parser.add_argument("--record", type=Path, default=RECORD)
    with language.one_core():
        measure(parser.parse_args())


def measure(arguments: argparse.Namespace) -> None:
    language.MODEL = arguments.model
    model, tokenizer = language.load()
    examples = language.observed(tokenizer, seed=arguments.corpus)
    record: dict[str, Any] = {
        "corpus seed": arguments.corpus, "cores used": 1, "words": len(recovery.WORDS),
        "texts": {name: len(part) for name, part in examples.items()},
        "draws": f"{language.CHAINS} chains × {arguments.draws}, burn-in {language.BURN_IN}, thin {language.THIN}, "
        f"batch {language.BATCH_SIZE}",
    }  # fmt: skip
    demo, step = language.POSTERIOR, language.SAMPLER.step_size * language.POSTERIOR.localization
    settings = [(demo.n_beta, demo.localization, step), (0.0, demo.localization, step)]
    if arguments.settings:
        settings = [tuple(map(float, one.split(","))) for one in arguments.settings.split(";")]
    for n_beta, localization, step in settings:
        rows = []
        for seed in range(arguments.seeds):
            started, cpu = time.perf_counter(), time.process_time()
            run = language.sample(
                model, examples, seed=seed, draws=arguments.draws,
                posterior=Posterior(n_beta=n_beta, localization=localization, weights=language.WEIGHTS),
                sampler=SGLD(step_size=step / localization),
            )  # fmt: skip
            seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
            about, scores = run.diagnostics(), recovery.posterior_correlation(run)
            rows.append({
                "seed": seed, **dataclasses.asdict(recovery.recover(scores)), "own_word": recovery.own_word(scores),
                "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
                **{key: about[key] for key in ("mean_loss", "mean_loss_at_center", "effective_draws")},
            })  # fmt: skip
            if "controls" not in record:
                record["controls"] = {
                    name: dataclasses.asdict(result)
                    for name, result in language.compare(run, model, examples).items()
                    if name != "posterior correlation"
                }
                print(record["controls"], flush=True)
            print(n_beta, localization, step, rows[-1], flush=True)
        name = f"posterior correlation, n_beta {n_beta:g}, localization {localization:g}, step {step:g}/localization"
        record[name] = {
            key: {"mean": float(np.mean([row[key] for row in rows])), "least": min(row[key] for row in rows)}
            for key in ("mean_reciprocal_rank", "same_category", "own_word")
        } | {"runs": rows}
        write_record(arguments.record, record)


if __name__ == "__main__":
    main()
