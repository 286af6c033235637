// A query, and the training examples that helped and harmed it most; methods side by side.

import { ask, askNumbers, askPixels, isReport } from "jostle/api.js";
import { choice, compact, element, excerpt, fieldText, plural, signed } from "jostle/dom.js";
import { comparable, methodName } from "jostle/runs.js";
import { matcher } from "jostle/search.js";

const SHOWN = 12;
const MOST_SHOWN = 192;
const AT_ONCE = 500; // images that one question may ask for

// An image drawn from its pixels, made larger without smoothing.
function canvas(pixels, [height, width, channels], label) {
  const node = element("canvas", { width, height, role: "img", "aria-label": label });
  const image = new ImageData(width, height);
  for (let pixel = 0; pixel < width * height; pixel++) {
    for (let colour = 0; colour < 3; colour++) image.data[4 * pixel + colour] = pixels[pixel * channels + (channels === 1 ? 0 : colour)];
    image.data[4 * pixel + 3] = 255;
  }
  node.getContext("2d").putImageData(image, 0, 0);
  return node;
}

export async function pictures(run, set, indices) {
  const shape = run.images?.[set];
  if (!shape || indices.length === 0) return null;
  const size = shape[0] * shape[1] * shape[2];
  const wanted = [...new Set(indices)];
  const pixels = new Uint8Array(wanted.length * size);
  for (let first = 0; first < wanted.length; first += AT_ONCE) {
    const some = wanted.slice(first, first + AT_ONCE);
    pixels.set(await askPixels({ run: run.run, set, indices: some.join(",") }), first * size);
  }
  const place = new Map(wanted.map((index, number) => [index, number]));
  return (index, label) => canvas(pixels.subarray(place.get(index) * size, (place.get(index) + 1) * size), shape, label);
}

export function named(example) {
  const label = example.fields.label;
  return label === undefined ? excerpt(example, 60) || `#${example.index}` : fieldText(label);
}

export class ImagesView {
  constructor(app, run) {
    this.app = app;
    this.run = run;
    this.element = element("div", { class: "images-view" });
  }

  forget() {
    this.shown = undefined;
  }

  // Everything that scores the same examples.
  get methods() {
    return [this.run, ...comparable(this.run, this.app.runs)];
  }

  async update(state) {
    const [train, queries] = await Promise.all(["train", "query"].map((set) => this.app.examples(set, this.run)));
    const query = queries.find((example) => example.index === Number(state.query ?? queries[0].index)) ?? queries[0];
    const wanted = matcher(state.search ?? "");
    const shownCount = Math.min(Math.max(Math.trunc(Number(state.count)) || SHOWN, 1), MOST_SHOWN);
    const key = JSON.stringify([query.index, state.search, shownCount]);
    if (this.shown === key) return;
    const tables = await Promise.all(
      this.methods.map(async (method) => {
        const scores = await askNumbers("influence", { run: method.run, set: "query", sample: query.index });
        const order = [...train.keys()].filter((place) => wanted(train[place])).sort((a, b) => scores[b] - scores[a]);
        const helpful = order.filter((place) => scores[place] > 0).slice(0, shownCount);
        const harmful = order.reverse().filter((place) => scores[place] < 0).slice(0, shownCount);
        const places = [...helpful, ...harmful];
        let errors = null;
        if (method.kind !== "scores" && places.length) {
          ({ errors } = await ask("errors", { run: method.run, set: "query", sample: query.index, level: "example", columns: places.join(",") }));
        }
        return { method, scores, helpful, harmful, errors: errors && new Map(places.map((place, number) => [place, errors[number]])) };
      }),
    );
    const needed = tables.flatMap(({ helpful, harmful }) => [...helpful, ...harmful]).map((place) => train[place].index);
    const [draw, drawQuery] = await Promise.all([pictures(this.run, "train", needed), pictures(this.run, "query", [query.index])]);
    this.shown = key;
    this.render({ train, queries, query, tables, draw, drawQuery, state, shownCount });
    this.element.dataset.ready = key;
  }

  render({ train, queries, query, tables, draw, drawQuery, state, shownCount }) {
    const common = (side) => {
      if (tables.length < 2) return new Set();
      return new Set(tables[0][side].filter((place) => tables.slice(1).every((table) => table[side].includes(place))));
    };
    const shared = { helpful: common("helpful"), harmful: common("harmful") };
    const place = queries.indexOf(query);
    const step = (by) => () => this.app.go({ query: queries[place + by].index }, { remember: true });
    const options = queries.map((example) => [example.index, `${example.index}: ${named(example)}`]);
    this.search ??= element("input", {
      type: "search", placeholder: "text, #12 or label:7", "aria-label": "Search training examples: text, #index or field:value",
      oninput: () => this.app.go({ search: this.search.value }),
    });
    if (this.search.value !== (state.search ?? "")) this.search.value = state.search ?? "";
    const aside = element(
      "section",
      { class: "pane query-image", "aria-label": "Query" },
      element(
        "div",
        { class: "bar" },
        choice("Query", options, query.index, (value) => this.app.go({ query: value }, { remember: true })),
        element("button", { type: "button", class: "plain", "aria-label": "Previous query", disabled: place === 0, onclick: step(-1) }, "‹"),
        element("button", { type: "button", class: "plain", "aria-label": "Next query", disabled: place === queries.length - 1, onclick: step(1) }, "›"),
      ),
      drawQuery ? drawQuery(query.index, `query ${query.index}: ${named(query)}`) : element("p", { class: "card" }, named(query)),
      element("dl", { class: "facts" }, Object.entries(query.fields).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, fieldText(value))])),
    );
    const grid = (table, side) =>
      element(
        "div",
        { class: `grid ${side}` },
        element("h3", { class: side === "helpful" ? "helps-text" : "harms-text" }, side === "helpful" ? "Most helpful: training on these lowers its loss" : "Most harmful: training on these raises its loss"),
        element(
          "ul",
          { class: "images" },
          table[side].map((number) => {
            const example = train[number];
            const both = shared[side].has(number);
            const error = table.errors?.get(number);
            return element(
              "li",
              { class: both ? "both" : null, "data-index": example.index },
              draw ? draw(example.index, `training image ${example.index}: ${named(example)}`) : element("p", { class: "words" }, excerpt(example, 140) || `#${example.index}`),
              element("span", { class: "caption" }, `${named(example)}: `, element("span", { class: "score" }, score(table.scores[number], table.method)), error ? " " : null, error ? element("span", { class: "error" }, `± ${error.toFixed(2)}`) : null),
              element("span", { class: "caption quiet" }, `#${example.index} `, both ? element("span", { class: "mark" }, tables.length > 2 ? "✓ all" : "✓ both") : null),
            );
          }),
          table[side].length === 0 ? element("li", { class: "quiet" }, "None.") : null,
        ),
      );
    const sections = tables.map((table) =>
      element(
        "section",
        { class: "method", "aria-label": table.method.name },
        element("h2", {}, `${table.method.name} (${methodName(table.method)})`),
        grid(table, "helpful"),
        grid(table, "harmful"),
      ),
    );
    const agreement = tables.length > 1
      ? element("p", { class: "agreement" }, `In common among the ${shownCount} most: `, element("b", {}, `${shared.helpful.size} helpful, ${shared.harmful.size} harmful`), ", marked ✓.")
      : null;
    const others = tables.some(({ method }) => method.kind === "scores");
    const left = shownCount < Math.min(MOST_SHOWN, train.length);
    const more = left ? element("button", { type: "button", class: "plain", onclick: () => this.app.go({ count: 2 * shownCount }) }, "Show more") : "";
    const scored = element(
      "div",
      { class: "pane" },
      element("div", { class: "bar search" }, this.search),
      element("p", { class: "quiet" }, `${plural(train.length, "training example")}${isReport ? " in this report" : ""}. Under each: its label, and the posterior correlation of its loss with the query's (positive helps) ± its Monte Carlo error.${others ? " Other methods have scales of their own; positive helps." : ""}`),
      agreement, element("div", { class: "methods" }, sections), more,
    );
    const typing = document.activeElement === this.search;
    this.element.replaceChildren(aside, scored);
    if (typing) this.search.focus();
  }

  key(event) {
    if (event.key === "[" || event.key === "]") {
      this.element.querySelector(`[aria-label="${event.key === "[" ? "Previous" : "Next"} query"]`)?.click();
    } else if (event.key === "/") {
      event.preventDefault();
      this.search?.focus();
    }
  }
}

// Correlations as such; other methods score on a scale of their own.
function score(value, method) {
  if (method.kind !== "scores") return signed(value);
  return (value < 0 ? "" : "+") + compact(Number(value.toPrecision(2)));
}
