"""Make the pictures of the viewer: ``python docs/make_screenshots.py RUNS [--stories MODEL]``.

RUNS is a directory where the runs of both demos are made, unless they are there. MODEL is a directory with the weights
of stories15M, which writes its own texts here. Needs Chromium and the extra ``dev``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import uvicorn
from playwright.sync_api import Browser, sync_playwright

import jostle
from jostle.demo import images, language
from jostle.runs.run import Run
from jostle.viewer.answers import Answers
from jostle.viewer.server import make_app
from jostle.viewer.sources import open_sources

IMAGES = Path(__file__).parent / "images"
SIZES = {"wide": (1280, 1000), "narrow": (390, 1690)}
"""Of a picture, at most: two screens of a phone."""

OPENINGS = {
    "dog": "Once upon a time, there was a little dog named",
    "sea": "One day, a boy went to the sea with his",
    "moon": "Lily looked at the moon and",
    "cake": "Mom and Tim wanted to bake a",
    "storm": "There was a big storm and the",
    "toy": "Ben and Mia both wanted to play with the same",
}

# What is photographed: which runs, the address within the page, and which of the four pictures are kept in the docs.
SHOTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "tokens": (("words",), "view=tokens&query=0&from=10", ("wide-light", "wide-dark", "narrow-light")),
    "map": (("digits",), "view=map&open=42", ("wide-light",)),
    "images": (("digits", "ekfac.safetensors"), "view=images&query=0&count=8", ("wide-light", "narrow-dark")),
    "health": (("digits",), "view=health", ("wide-light", "narrow-light")),
    "compare": (("digits", "ekfac.safetensors"), "view=compare&query=0", ("wide-light",)),
    "stories-tokens": (("stories",), "view=tokens&query=5&from=35&to=39", ("wide-light", "narrow-dark")),
    "stories-health": (("stories",), "view=health", ("wide-light",)),
    "stories-map": (("stories",), "view=map&colour=topic", ("wide-light",)),
}


# The middle of the strongest token of the first text.
STRONGEST = """() => {
  const strength = (token) => Number(token.style.getPropertyValue("--strength"));
  const tokens = [...document.querySelector(".train-pane .card").querySelectorAll(".token.helps")];
  const box = tokens.reduce((a, b) => (strength(b) > strength(a) ? b : a)).getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""

# Where the last block ends that is wholly in the window.
LAST_WHOLE = """() => {
  const blocks = [...document.querySelectorAll(".card, .plot, .images, .map-view, .compare-view")];
  const bottoms = blocks.map((block) => block.getBoundingClientRect().bottom);
  return Math.min(innerHeight, Math.ceil(Math.max(...bottoms.filter((bottom) => bottom <= innerHeight))) + 6);
}"""


def make_digits(out: Path) -> None:
    """The demo's classifier of digits, and EK-FAC's scores of the same images."""
    run = images.demonstrate(out, seed=0)
    train, test = images.load_digits(0)
    model = images.train(train, 0)
    with torch.no_grad():
        chosen = images.choose_queries(model(test.images), test.labels)
    scores = jostle.attributors.ekfac(model, train, test.take(chosen), loss=jostle.losses.classification())
    scores.save(out / "ekfac.safetensors")
    assert run.influence().shape == scores.shape


def make_stories(model: Path, out: Path) -> None:
    """A run on stories that the model wrote itself."""
    import transformers

    from jostle.asking import requests

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    auto: Any = transformers.AutoModelForCausalLM
    network = auto.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)

    def write(each: int) -> list[dict[str, str]]:
        stories = []
        for topic, opening in OPENINGS.items():
            asked = tokenizer(opening, return_tensors="pt")
            told = network.generate(
                **asked, do_sample=True, temperature=0.9, max_new_tokens=40, num_return_sequences=each
            )
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in told]
            stories += [{"prompt": opening, "completion": text[len(opening) :], "topic": topic} for text in texts]
        return stories

    out.mkdir(parents=True)
    train = [{"text": one["prompt"] + one["completion"], "topic": one["topic"]} for one in write(8)]
    for name, part in (("train", train), ("query", write(1))):
        (out / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    settings = {
        "model": str(model), "train": str(out / "train.jsonl"), "query": str(out / "query.jsonl"), "chains": 2,
        "draws": 110, "burn_in": 5, "thin": 1, "batch_size": 4, "n_beta": 5.0, "localization": 3e4,
        "sampler": "ornstein-uhlenbeck", "step_size": 2e-4,
    }  # fmt: skip
    requests.carry_out(requests.resolve(settings), out / "run", say=print)


@contextmanager
def served(paths: list[Path]) -> Iterator[str]:
    """The page of some runs."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    app = make_app(Answers(open_sources(paths, Run)))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
    server.should_exit = True
    thread.join()


def photograph(browser: Browser, address: str, view: str, size: tuple[int, int], scheme: Any, path: Path) -> None:
    """Open a view, wait until it stands still, and take its picture."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, device_scale_factor=1
    )
    page = context.new_page()
    page.goto(f"{address}#{view}")
    page.wait_for_selector("[data-ready], .tokens-view[data-selection] .card .error:not(:empty)", timeout=180_000)
    if "view=tokens" in view and size[0] > 1000:
        page.mouse.move(*page.evaluate(STRONGEST))
        page.wait_for_selector(".tip:has-text('batches')")
    page.wait_for_timeout(300)
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": size[0], "height": page.evaluate(LAST_WHOLE)})
    overflow = page.evaluate("document.documentElement.scrollWidth > innerWidth")
    assert not overflow, f"{path.name} is wider than the window"
    context.close()


def main() -> None:
    """Make what is missing, and photograph it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--all", type=Path, metavar="DIR", help="every picture, there, instead of those of the docs")
    parser.add_argument("--only", help="the pictures whose name begins so")
    arguments = parser.parse_args()
    places = {name: arguments.runs / name for name in ("words", "digits", "stories")}
    if not (places["words"] / "run").is_dir():
        language.demonstrate(places["words"], seed=0)
    if not (places["digits"] / "run").is_dir():
        make_digits(places["digits"])
    if arguments.stories and not (places["stories"] / "run").is_dir():
        make_stories(arguments.stories, places["stories"])
    out = arguments.all or IMAGES
    out.mkdir(exist_ok=True)
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, (runs, view, kept) in SHOTS.items():
            paths = [places["digits"] / run if "." in run else places[run] / "run" for run in runs]
            if not all(path.exists() for path in paths) or not name.startswith(arguments.only or ""):
                continue
            with served(paths) as address:
                for width, size in SIZES.items():
                    for scheme in ("light", "dark"):
                        if arguments.all or f"{width}-{scheme}" in kept:
                            path = out / f"viewer-{name}-{width}-{scheme}.png"
                            photograph(browser, address, view, size, scheme, path)
                            print(path)
        browser.close()


if __name__ == "__main__":
    main()
