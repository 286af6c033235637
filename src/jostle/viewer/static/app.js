// The frame around the views: which run, which view, and an address that says exactly what is shown.

import { ask, isReport, start } from "jostle/api.js";
import { choice, element, plural } from "jostle/dom.js";
import { CompareView } from "jostle/compare.js";
import { HealthView } from "jostle/health.js";
import { ImagesView } from "jostle/images.js";
import { MapView } from "jostle/map.js";
import { TokensView } from "jostle/tokens.js";

const REFRESH = 3000;

const VIEWS = {
  tokens: { title: "Tokens", make: TokensView, fits: (run) => run.kind === "tokens" },
  images: { title: "Images", make: ImagesView, fits: (run) => run.kind === "examples" },
  health: { title: "Health", make: HealthView, fits: (run) => run.kind !== "scores" && run.kind !== "problem" },
  map: { title: "Map", make: MapView, fits: (run) => ["tokens", "examples"].includes(run.kind) && run.has_traces },
  compare: {
    title: "Compare",
    make: CompareView,
    fits: (run, runs) => runs.length > 1 && run.kind !== "problem",  // where nothing fits, it says why
  },
};

const KEYS = [
  ["← →", "previous and next token of the query"],
  ["Shift + ← →", "a span of tokens: the influence of their sum"],
  ["Home, End", "first and last token"],
  ["Esc", "the whole completion again"],
  ["[  ]", "previous and next query"],
  ["h, x", "helpful, harmful"],
  ["/", "search"],
  ["Tab", "on to the training texts; there ← → walk along the tokens"],
  ["Enter", "on a training token: the other way round"],
  ["← → ↑ ↓", "in a map or a comparison: the nearest point that way; Enter opens it"],
  ["?", "this list"],
];

class App {
  constructor() {
    this.runs = [];
    this.examplesOf = new Map();
    this.views = new Map();
    this.verdicts = new Map();
    this.main = document.getElementById("main");
    this.header = document.getElementById("header");
    this.state = this.readAddress();
  }

  readAddress() {
    return { ...start, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
  }

  // Changes of what is looked at can be gone back from; refinements of it replace each other.
  go(changes, { remember = false } = {}) {
    for (const [name, value] of Object.entries(changes)) {
      if (value === undefined || value === null || value === "") delete this.state[name];
      else this.state[name] = String(value);
    }
    try {
      history[remember ? "pushState" : "replaceState"](null, "", "#" + new URLSearchParams(this.state));
    } catch {
      // Inside a notebook there is no address to keep it in.
    }
    return this.render();
  }

  get run() {
    const wanted = this.runs[Number(this.state.run ?? 0)];
    return wanted ?? this.runs[0];
  }

  get fitting() {
    return Object.entries(VIEWS).filter(([, view]) => view.fits(this.run, this.runs));
  }

  get view() {
    const names = this.fitting.map(([name]) => name);
    return names.includes(this.state.view) ? this.state.view : names[0];
  }

  // The run whose examples stand for those of a file of scores: the first of the same sizes.
  exampleRun(run = this.run) {
    if (run.kind !== "scores") return run;
    const same = (other) =>
      (other.kind === "tokens" || other.kind === "examples") &&
      other.sizes.train === run.sizes.train && other.sizes.query === run.sizes.query;
    return this.runs.find(same) ?? run;
  }

  async examples(set, run = this.exampleRun()) {
    const key = `${run.run} ${set}`;
    if (!this.examplesOf.has(key)) {
      const asked = run.kind === "scores"
        ? Promise.resolve({ examples: Array.from({ length: run.sizes[set] }, (_, index) => ({ index, text: null, fields: {} })) })
        : ask("examples", { run: run.run, set });
      this.examplesOf.set(key, asked.then(({ examples }) => examples));
      asked.catch(() => this.examplesOf.delete(key));
    }
    return this.examplesOf.get(key);
  }

  async begin() {
    try {
      this.runs = (await ask("runs")).runs;
    } catch (error) {
      this.main.replaceChildren(trouble(error.message));
      return;
    }
    window.addEventListener("hashchange", () => this.adopt());
    window.addEventListener("popstate", () => this.adopt());
    document.addEventListener("keydown", (event) => this.key(event));
    // Not by its address, which says what is shown.
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    await this.render();
    if (!isReport) setInterval(() => this.refresh(), REFRESH);
  }

  adopt() {
    const there = this.readAddress();
    if (JSON.stringify(there) === JSON.stringify(this.state)) return;
    this.state = there;
    this.render();
  }

  // A run that is still sampling, or cannot be read yet, is asked for again until it is finished.
  async refresh() {
    const waiting = (run) => run.kind === "problem" || (run.kind !== "scores" && run.status !== "complete");
    if (document.hidden || !this.runs.some(waiting)) return;
    let runs;
    try {
      ({ runs } = await ask("runs"));
    } catch {
      return; // the server is gone, or busy; what is shown stays
    }
    const before = JSON.stringify(this.runs);
    this.runs = runs;
    if (JSON.stringify(runs) !== before) {
      this.examplesOf.clear();
      for (const view of this.views.values()) view.forget?.();
      await this.render();
    } else if (this.view === "health") {
      this.views.get(this.keyOf(this.view))?.forget?.();
      await this.render();
    }
  }

  keyOf(name) {
    return `${name} ${this.run.run}`;
  }

  async render() {
    const run = this.run;
    if (run === undefined) {
      this.main.replaceChildren(trouble("There is nothing to show."));
      return;
    }
    this.renderHeader();
    document.title = `${run.name} – Jostle`;
    if (run.kind === "problem") {
      this.main.replaceChildren(trouble(run.problem));
      return;
    }
    const name = this.view;
    if (name === undefined) {
      this.main.replaceChildren(trouble("Scores alone have nothing to show: open them together with a run."));
      return;
    }
    const key = this.keyOf(name);
    if (!this.views.has(key)) this.views.set(key, new VIEWS[name].make(this, run));
    const view = this.views.get(key);
    if (this.main.firstChild !== view.element) this.main.replaceChildren(view.element);
    const asked = (this.asked = {});
    try {
      await view.update(this.state);
      for (const old of view.element.querySelectorAll(":scope > .trouble")) old.remove();
    } catch (error) {
      if (asked !== this.asked) return;
      for (const old of view.element.querySelectorAll(":scope > .trouble")) old.remove();
      view.element.prepend(trouble(error.message));
    }
    this.main.dataset.view = name;
    await this.judge(run);
  }

  // Scores that cannot be relied on say so on every page, and not under Health alone.
  async judge(run) {
    const key = `${run.run} ${run.draws}`;
    if (run.status === undefined || this.verdicts.has(key)) return;
    this.verdicts.set(key, null);
    const { diagnostics } = await ask("health", { run: run.run }).catch(() => ({}));
    this.verdicts.set(key, diagnostics?.verdict.level ?? null);
    if (this.run === run) this.renderHeader();
  }

  renderHeader() {
    const run = this.run;
    const parts = [element("h1", { class: "brand" }, element("a", { href: "#" }, "Jostle"))];
    if (this.runs.length > 1) {
      const options = this.runs.map((one) => [one.run, one.name]);
      parts.push(choice("Run", options, run.run, (value) => this.go({ ...CLEARED, run: value }, { remember: true })));
    } else {
      parts.push(element("span", { class: "run-name" }, run.name));
    }
    const tabs = this.fitting.map(([name, view]) =>
      element(
        "button",
        {
          type: "button",
          "aria-current": name === this.view ? "page" : null,
          "data-view": name,
          onclick: () => this.go({ view: name }, { remember: true }),
        },
        name === "images" && !run.images?.train ? "Examples" : view.title,
      ),
    );
    parts.push(element("nav", { "aria-label": "Views" }, tabs));
    if (run.status && run.status !== "complete") {
      parts.push(element("span", { class: "badge sampling" }, `still sampling: ${plural(run.draws, "draw")} of ${plural(run.chains, "chain")}`));
    }
    if (run.kappa) {
      const about = "Read at a larger n_beta than was sampled, with the training losses held (--kappa)";
      parts.push(element("span", { class: "badge", title: about }, `read at κ = ${run.kappa}`));
    }
    const level = this.verdicts.get(`${run.run} ${run.draws}`);
    if (level && level !== "good") {
      parts.push(element("button", { type: "button", class: `badge ${level}`, onclick: () => this.go({ view: "health" }, { remember: true }) }, level));
    }
    const copy = element("button", { type: "button", class: "plain", onclick: () => this.copyLink(copy) }, "Copy link");
    parts.push(
      element(
        "span",
        { class: "tools" },
        isReport ? null : copy,
        element("button", { type: "button", class: "plain", "aria-label": "Keys", onclick: () => this.help() }, "?"),
      ),
    );
    const focused = document.activeElement?.dataset?.view;
    this.header.replaceChildren(...parts);
    if (focused) this.header.querySelector(`[data-view="${focused}"]`)?.focus();
  }

  async copyLink(button) {
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy it from the address bar";
    }
    setTimeout(() => (button.textContent = "Copy link"), 2000);
  }

  help() {
    const rows = KEYS.map(([keys, meaning]) =>
      element("tr", {}, element("th", { scope: "row" }, element("kbd", {}, keys)), element("td", {}, meaning)),
    );
    const dialog = element(
      "dialog",
      { "aria-label": "Keys", onclose: () => dialog.remove() },
      element("h2", {}, "Keys"),
      element("table", {}, element("tbody", {}, rows)),
      element("form", { method: "dialog" }, element("button", { class: "plain" }, "Close")),
    );
    document.body.append(dialog);
    dialog.showModal();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || document.querySelector("dialog[open]")) return;
    if (event.key === "?") return this.help();
    this.views.get(this.keyOf(this.view))?.key?.(event);
  }
}

// What belongs to one run and means nothing in another.
const CLEARED = Object.fromEntries(["query", "from", "to", "train", "token", "search", "other", "open", "colour"].map((name) => [name, null]));

function trouble(message) {
  return element("p", { class: "trouble", role: "alert" }, message);
}

new App().begin();
