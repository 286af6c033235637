// Two methods' scores of the same examples for one query: point by point, and how far their rankings agree.

import { ask } from "jostle/api.js";
import { choice, element, excerpt, svg } from "jostle/dom.js";
import { Plot, walk } from "jostle/draw.js";
import { named, pictures } from "jostle/images.js";
import { comparable, incomparable, methodName } from "jostle/runs.js";

export class CompareView {
  constructor(app, run) {
    this.app = app;
    this.run = run;
    this.element = element("div", { class: "compare-view" }, element("p", { class: "quiet" }, "Comparing…"));
  }

  forget() {
    this.shown = undefined;
  }

  async update(state) {
    const others = comparable(this.run, this.app.runs);
    const other = others.find((run) => run.run === Number(state.other)) ?? others[0];
    if (other === undefined) {
      this.element.replaceChildren(element("p", { class: "quiet" }, incomparable(this.run, this.app.runs)));
      this.shown = undefined;
      this.element.dataset.ready = "nothing";
      return;
    }
    const queries = await this.app.examples("query");
    const query = queries.find((example) => example.index === Number(state.query ?? queries[0].index)) ?? queries[0];
    const ranks = state.scale === "ranks";
    const key = JSON.stringify([other.run, query.index, state.open, ranks]);
    if (key === this.shown) return;
    const bar = element(
      "div",
      { class: "bar" },
      element("span", {}, `${this.run.name} against`),
      choice("", others.map((run) => [run.run, run.name]), other.run, (value) => this.app.go({ other: value })),
      choice("Query", queries.map((example) => [example.index, `${example.index}: ${named(example)}`.slice(0, 60)]), query.index, (value) => this.app.go({ query: value })),
      choice("Show", [["scores", "scores"], ["ranks", "ranks"]], ranks ? "ranks" : "scores", (value) => this.app.go({ scale: value })),
    );
    bar.querySelectorAll("select")[0].setAttribute("aria-label", "Compare with");
    const found = await ask("compare", { run: this.run.run, other: other.run, query: query.index });
    const train = await this.app.examples("train");
    const byIndex = new Map(train.map((example) => [example.index, example]));
    const plot = new Plot({ title: `Scores for query ${query.index}`, about: ranks ? "a point is a training example; the most helpful has rank 1" : "a point is a training example; positive helps", x: `${this.run.name} (${methodName(this.run)})`, y: `${other.name} (${methodName(other)})`, width: 760, height: 520, role: "listbox" });
    const shown = [found.first, found.second].map((scores) => (ranks ? ranksOf(scores) : scores));
    plot.points(...shown, (x, y, index) => {
      const label = `#${index} ${byIndex.has(index) ? excerpt(byIndex.get(index), 90) || named(byIndex.get(index)) : ""}`;
      const chosen = String(index) === state.open;
      const attributes = { class: "dot", role: "option", tabindex: "-1", "aria-label": `training example ${label}`, "aria-selected": String(chosen), "data-index": index };
      return svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: chosen ? 7 : 4, ...attributes, onclick: () => this.app.go({ open: index }) }, svg("title", {}, label));
    });
    if (!ranks) plot.level(0, { class: "axis" }).upright(0, { class: "axis" });
    const fact = (name, value, about) => [element("dt", {}, name), element("dd", {}, element("b", {}, value), element("span", { class: "quiet" }, ` ${about}`))];
    const rank = (value) => (value === null ? "–" : value.toFixed(2).replace("-", "−"));
    const opened = state.open === undefined ? undefined : byIndex.get(Number(state.open));
    const draw = opened ? await pictures(this.app.exampleRun(), "train", [opened.index]).catch(() => null) : null;
    const focused = document.activeElement?.classList?.contains("dot");
    this.element.replaceChildren(
      bar,
      element(
        "div",
        { class: "compare-columns" },
        plot.draw(),
        element(
          "section",
          { class: "card", "aria-label": "Agreement" },
          element("h2", {}, "Do they rank alike?"),
          element(
            "dl",
            { class: "facts" },
            fact("Spearman", rank(found.spearman), `of this query's scores; over ${found.queries} queries the median is ${rank(found.median_spearman)}`),
            fact("Helpful", `${found.helpful_in_common} of ${found.top}`, "most helpful in common"),
            fact("Harmful", `${found.harmful_in_common} of ${found.top}`, "most harmful in common"),
          ),
          opened
            ? element("div", { class: "opened" }, element("h3", {}, `train ${opened.index}`), draw?.(opened.index, `training image ${opened.index}`), element("p", { class: "text" }, opened.text ?? named(opened)))
            : element("p", { class: "quiet" }, state.open === undefined ? "" : `Example ${state.open} is not part of this. `, "Click a point to see the example, or walk with the arrow keys and press Enter."),
        ),
      ),
    );
    this.points = [...this.element.querySelectorAll(".dot")];
    const first = this.points.find((point) => point.dataset.index === state.open) ?? this.points[0];
    if (first) first.tabIndex = 0;
    if (focused) first?.focus();
    this.shown = key;
    this.element.dataset.ready = key;
  }

  key(event) {
    walk(event, this.points ?? [], (open) => this.app.go({ open }));
  }
}

function ranksOf(scores) {
  const ranks = new Array(scores.length);
  [...scores.keys()].sort((a, b) => scores[b] - scores[a]).forEach((index, place) => (ranks[index] = place + 1));
  return ranks;
}
