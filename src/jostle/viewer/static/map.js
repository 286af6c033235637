// Training examples in the plane, near each other where their losses move together.

import { ask, askNumbers, isReport } from "jostle/api.js";
import { choice, element, excerpt, fieldText, svg } from "jostle/dom.js";
import { walk } from "jostle/draw.js";
import { named, pictures } from "jostle/images.js";
import { legend, reachOf } from "jostle/scale.js";

const COLOURS = ["#1f77b4", "#e07b00", "#2a9d5c", "#b84a8b", "#6f5bb5", "#8c6a3f", "#17a2b8", "#c0392b", "#7f8c2f", "#5d6d7e"];
const MARKS = 10; // as many values as there are colours; more are grey

export class MapView {
  constructor(app, run) {
    this.app = app;
    this.run = run;
    this.stage = element("div", { class: "stage" }, element("p", { class: "quiet" }, "Arranging the examples…"));
    this.side = element("section", { class: "pane map-side", "aria-label": "Chosen example", "aria-live": "polite" });
    this.bar = element("div", { class: "bar" });
    this.colours = element("div", { class: "keys" });
    this.element = element("div", { class: "map-view" }, element("div", { class: "pane" }, this.bar, this.colours, this.stage), this.side);
  }

  forget() {
    this.map = undefined;
  }

  async update(state) {
    const examples = await this.app.examples("train", this.run);
    const layout = state.layout ?? "";
    if (!this.map || this.layout !== layout) {
      this.map = await ask("map", layout ? { run: this.run.run, layout } : { run: this.run.run });
      this.layout = layout;
    }
    const queries = await this.app.examples("query", this.run);
    const byIndex = (this.byIndex = new Map(examples.map((example) => [example.index, example])));
    const names = fieldNames(examples);
    const known = names.includes(state.colour) || state.colour === "query";
    const by = known ? state.colour : names.includes("label") ? "label" : names[0] ?? "query";
    const options = [...names.map((name) => [name, name]), ["query", "correlation with a query"]];
    this.bar.replaceChildren(
      choice("Colour by", options, by, (colour) => this.app.go({ colour })),
      ...(by === "query" ? [choice("Query", queries.map((query) => [query.index, `${query.index}: ${named(query)}`.slice(0, 50)]), state.query ?? queries[0].index, (query) => this.app.go({ query }))] : []),
      choice("Layout", [["neighbours", "neighbours (t-SNE)"], ["principal", "principal axes"]], this.map.layout, (wanted) => this.app.go({ layout: wanted })),
    );
    const paint = await this.painter(by, examples, state, queries);
    this.colours.replaceChildren(...paint.key);
    this.draw(paint.colour, byIndex, state);
    await this.open(state.open === undefined ? null : Number(state.open));
    this.element.dataset.ready = "true";
  }

  async painter(by, examples, state, queries) {
    if (by === "query") {
      const numbers = await askNumbers("influence", { run: this.run.run, set: "query", sample: state.query ?? queries[0].index });
      const scores = numbers.subarray(0, examples.length);
      const reach = reachOf(scores);
      const place = new Map(examples.map((example, number) => [example.index, number]));
      const colour = (index) => {
        const value = scores[place.get(index)];
        const strength = 0.15 + 0.85 * Math.min(1, Math.abs(value) / reach);
        return `rgb(var(${value > 0 ? "--helps" : "--harms"}) / ${strength.toFixed(2)})`;
      };
      return { colour, key: [legend(reach)] };
    }
    const counts = new Map();
    for (const example of examples) {
      const value = fieldText(example.fields[by]);
      counts.set(value, (counts.get(value) ?? 0) + 1);
    }
    const common = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)).slice(0, MARKS).sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const colour = (index) => {
      const number = common.indexOf(fieldText(this.byIndex.get(index)?.fields[by]));
      return number < 0 ? "var(--quiet)" : COLOURS[number];
    };
    const key = common.map((value, number) => element("span", { class: "key" }, element("span", { class: "swatch round", style: `background: ${COLOURS[number]}` }), value));
    if (counts.size > MARKS) key.push(element("span", { class: "key quiet" }, `and ${counts.size - MARKS} more, in grey`));
    return { colour, key };
  }

  draw(colour, byIndex, state) {
    const { indices, places } = this.map;
    const [wide, high] = innerWidth < 760 ? [420, 440] : [820, 620];
    const bounds = [0, 1].map((axis) => places.map((place) => place[axis])).map((values) => [Math.min(...values), Math.max(...values)]);
    const along = (value, [least, most], size) => 18 + ((value - least) / (most - least || 1)) * (size - 36);
    const radius = Math.max(3.5, Math.min(8, 160 / Math.sqrt(indices.length)));
    this.points = indices.map((index, number) => {
      const example = byIndex.get(index);
      const x = along(places[number][0], bounds[0], wide);
      const y = high - along(places[number][1], bounds[1], high);
      return svg(
        "circle",
        {
          cx: x.toFixed(1), cy: y.toFixed(1), r: radius, fill: example ? colour(index) : "var(--line)", class: "place", tabindex: "-1", role: "option",
          "aria-selected": String(String(index) === state.open), "aria-label": `training example ${index}${example ? `: ${named(example)}` : ""}`, "data-index": index,
          onclick: () => this.app.go({ open: index }),
        },
        svg("title", {}, `#${index} ${example ? excerpt(example, 120) || named(example) : ""}`),
      );
    });
    const first = this.points.find((point) => point.dataset.index === state.open) ?? this.points[0];
    if (first) first.tabIndex = 0;
    const focused = document.activeElement?.classList?.contains("place") ? document.activeElement.dataset.index : null;
    const shown = this.map.variance === null ? "" : ` They show ${(100 * this.map.variance).toFixed(0)} % of the variance.`;
    const what = this.map.layout === "principal"
      ? `Principal axes of the correlation of losses.${shown}`
      : "Neighbours move together; how far groups are apart means nothing.";
    const absent = indices.filter((index) => !byIndex.has(index)).length;
    const pale = absent ? ` The ${absent.toLocaleString("en")} pale points are not part of this report.` : "";
    const many = this.map.indices.length < this.map.of ? ` ${this.map.indices.length} of ${this.map.of} examples.` : "";
    this.stage.replaceChildren(
      svg("svg", { viewBox: `0 0 ${wide} ${high}`, class: "map", role: "listbox", "aria-label": "Training examples, by how their losses move together" }, onTop(this.points)),
      element("p", { class: "quiet" }, `${what}${many}${pale} Click a point, or walk with the arrow keys and press Enter.`),
    );
    if (focused !== null) this.points.find((point) => point.dataset.index === focused)?.focus();
  }

  async open(index) {
    const example = index === null ? undefined : this.byIndex.get(index);
    if (!example) {
      this.side.replaceChildren(element("p", { class: "quiet" }, index === null ? "Choose a point to see the example." : `Example ${index} is not part of this ${isReport ? "report" : "map"}.`));
      return;
    }
    const draw = await pictures(this.run, "train", [index]).catch(() => null);
    const tokens = this.run.kind === "tokens";
    this.side.replaceChildren(
      element("h2", {}, `train ${index}`),
      draw ? draw(index, `training image ${index}: ${named(example)}`) : element("p", { class: "text" }, example.text ?? named(example)),
      element("dl", { class: "facts" }, Object.entries(example.fields).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, fieldText(value))])),
      element("button", { type: "button", class: "plain", onclick: () => this.app.go({ view: tokens ? "tokens" : "images", search: `#${index}` }, { remember: true }) }, tokens ? "Open among the tokens" : "Open among the images"),
    );
  }

  key(event) {
    walk(event, this.points ?? [], (open) => this.app.go({ open }));
  }
}

// What is drawn last lies above the rest.
function onTop(points) {
  const chosen = (point) => point.getAttribute("aria-selected") === "true";
  return [...points].sort((a, b) => chosen(a) - chosen(b));
}

// Fields that most examples have, and that do not tell every one of them apart.
function fieldNames(examples) {
  const names = new Map();
  for (const example of examples) for (const name of Object.keys(example.fields)) names.set(name, (names.get(name) ?? 0) + 1);
  return [...names.keys()].filter((name) => {
    const distinct = new Set(examples.map((example) => fieldText(example.fields[name])));
    return names.get(name) > examples.length / 2 && distinct.size > 1 && distinct.size <= Math.max(12, examples.length / 2);
  });
}
