// A query's text beside the training texts, every token coloured by its correlation with what is chosen.

import { ask, askNumbers, isReport } from "jostle/api.js";
import { choice, element, excerpt, fieldText, plural, signed } from "jostle/dom.js";
import { legend, Ranks, reachOf } from "jostle/scale.js";
import { matcher } from "jostle/search.js";
import { Texts } from "jostle/texts.js";

const SHOWN_TOKENS = 800; // more than a screen holds; more when the end comes near
const KEPT_ANSWERS = 64;

export class TokensView {
  constructor(app, run) {
    this.app = app;
    this.run = run;
    this.answers = new Map();
    this.limit = SHOWN_TOKENS;
    this.status = element("p", { class: "visually-hidden", role: "status" });
    this.tip = element("div", { class: "tip", role: "tooltip", hidden: true });
    this.queryPane = element("section", { class: "pane query-pane", "aria-label": "Query" });
    this.trainPane = element("section", { class: "pane train-pane", "aria-label": "Training texts" });
    this.element = element("div", { class: "tokens-view" }, this.queryPane, this.trainPane, this.tip, this.status);
    this.element.addEventListener("pointerdown", (event) => this.press(event));
    this.element.addEventListener("pointerover", (event) => this.over(event));
    this.element.addEventListener("pointerleave", () => this.hideTip());
    this.element.addEventListener("focusin", (event) => this.focus(event));
    this.element.addEventListener("focusout", () => this.hideTip());
    window.addEventListener("pointerup", () => this.release());
    window.addEventListener("scroll", () => this.hideTip(), { passive: true });
  }

  forget() {
    this.answers.clear();
    this.isStale = true;
  }

  async load() {
    if (this.texts && !this.isStale) return;
    const [train, query] = await Promise.all(["train", "query"].map((set) => this.app.examples(set, this.run)));
    this.isStale = false;
    // While a run samples its texts stay, and so do their elements: one of them may have the focus.
    const known = this.texts && [this.texts.train.examples, this.texts.query.examples];
    if (JSON.stringify(known) === JSON.stringify([train, query])) return;
    this.texts = { train: new Texts("train", train), query: new Texts("query", query) };
  }

  // What is chosen: one token or more of a query, all of it, or one training token (then it is the other way round).
  selection(state) {
    const queries = this.texts.query;
    if (state.train !== undefined && state.token !== undefined && this.texts.train.place.has(Number(state.train))) {
      const index = Number(state.train);
      const positions = this.texts.train.examples[this.texts.train.place.get(index)].positions;
      if (positions.includes(Number(state.token))) {
        return { set: "train", sample: index, from: Number(state.token), to: Number(state.token) };
      }
    }
    const asked = Number(state.query ?? queries.examples[0].index);
    const index = queries.place.has(asked) ? asked : queries.examples[0].index;
    const positions = queries.examples[queries.place.get(index)].positions;
    const from = Number(state.from);
    const to = Number(state.to ?? state.from);
    if (state.from !== undefined && positions.some((position) => position >= from && position <= to)) {
      return { set: "query", sample: index, from, to };
    }
    return { set: "query", sample: index };
  }

  async update(state) {
    this.element.setAttribute("aria-busy", "true");
    await this.load();
    const selection = (this.selected = this.selection(state));
    const key = JSON.stringify(selection);
    if (key !== this.element.dataset.selection) {
      this.limit = SHOWN_TOKENS;
      this.hideTip();
    }
    this.mark();
    this.renderQuery();
    if (!this.answers.has(key)) {
      const { set, sample, from, to } = selection;
      const parameters = { run: this.run.run, set, sample, ...(from === undefined ? {} : { from, to }) };
      const asked = askNumbers("influence", parameters);
      if (this.answers.size >= KEPT_ANSWERS) this.answers.delete(this.answers.keys().next().value);
      this.answers.set(key, asked);
      asked.catch(() => this.answers.delete(key));
    }
    const numbers = await this.answers.get(key);
    if (JSON.stringify(this.selected) !== key) return; // something else was chosen meanwhile
    const other = this.texts[selection.set === "query" ? "train" : "query"];
    this.byExample = numbers.subarray(0, other.examples.length);
    this.byToken = numbers.subarray(other.examples.length);
    this.reach = reachOf(this.byToken);
    this.ranks = null;
    this.texts[selection.set].fade();
    // An element that is moved to another place loses the focus, and gets it back.
    const focused = document.activeElement;
    if (this.element.contains(focused)) this.refocus ??= () => focused;
    if (selection.set === "query") this.renderTraining(state);
    else this.renderReversed(state);
    this.element.dataset.selection = key;
    this.element.setAttribute("aria-busy", "false");
    if (this.refocus) {
      const node = this.refocus();
      this.refocus = null;
      if (document.activeElement !== node && node?.isConnected) node.focus({ preventScroll: true });
    }
  }

  describe() {
    const { set, sample, from, to } = this.selected;
    const texts = this.texts[set];
    const example = texts.examples[texts.place.get(sample)];
    if (from === undefined) return `all ${plural(example.positions.length, "scored token")} of query ${sample}`;
    const chosen = example.tokens.filter((_, position) => position >= from && position <= to).join("");
    const shown = chosen.trim().length > 40 ? chosen.trim().slice(0, 39) + "…" : chosen.trim() || "␣";
    const where = from === to ? `token ${from}` : `tokens ${from} to ${to}`;
    return `“${shown}” (${where} of ${set === "query" ? "query" : "training text"} ${sample})`;
  }

  mark() {
    const { set, sample, from, to } = this.selected;
    const { scored } = this.texts[set].tokensOf(this.texts[set].place.get(sample));
    const inside = scored.filter((token) => from !== undefined && token.position >= from && token.position <= to);
    for (const token of this.marked ?? []) if (!inside.includes(token)) token.setAttribute("aria-selected", "false");
    for (const token of inside) token.setAttribute("aria-selected", "true");
    this.marked = inside;
  }

  renderQuery() {
    if (this.selected.set !== "query") return;
    const queries = this.texts.query;
    const place = queries.place.get(this.selected.sample);
    const { box, scored } = queries.tokensOf(place);
    this.mark();
    const roving = scored.find((token) => token.position === this.selected.from) ?? scored[0];
    for (const token of scored) token.tabIndex = token === roving ? 0 : -1;
    this.chosen ??= element("b");
    this.chosen.textContent = this.describe();
    this.whole ??= element("button", { type: "button", class: "plain", onclick: () => this.app.go({ from: null, to: null }) }, "Whole completion");
    this.whole.disabled = this.selected.from === undefined;
    // The same query with another token stays where it is, and keeps the focus.
    if (box.parentNode === this.queryPane) return;
    const options = queries.examples.map((example) => [example.index, `${example.index}: ${excerpt(example, 48)}`]);
    const step = (by) => () => this.step(by);
    const parts = [
      element(
        "div",
        { class: "bar" },
        choice("Query", options, this.selected.sample, (value) => this.app.go({ query: value, from: null, to: null }, { remember: true })),
        element("button", { type: "button", class: "plain", "aria-label": "Previous query", disabled: place === 0, onclick: step(-1) }, "‹"),
        element("button", { type: "button", class: "plain", "aria-label": "Next query", disabled: place === queries.examples.length - 1, onclick: step(1) }, "›"),
      ),
      fields(queries.examples[place]),
      box,
      element("p", { class: "chosen" }, "Chosen: ", this.chosen),
      element(
        "div",
        { class: "bar" },
        this.whole,
        element("span", { class: "quiet" }, "Click a token, drag over several, or use ← →."),
      ),
    ];
    this.queryPane.replaceChildren(...parts.filter(Boolean));
  }

  step(by) {
    const queries = this.texts.query;
    const place = queries.place.get(this.selected.set === "query" ? this.selected.sample : Number(this.app.state.query ?? 0)) + by;
    if (place >= 0 && place < queries.examples.length) {
      this.app.go({ query: queries.examples[place].index, from: null, to: null, train: null, token: null }, { remember: true });
    }
  }

  // Places of the training texts that are asked for, best first.
  ranked(texts, state) {
    const harmful = state.order === "harmful";
    const scores = state.by === "token" ? texts.strongest(this.byToken, harmful) : this.byExample;
    const wanted = matcher(state.search ?? "");
    const places = [];
    for (let place = 0; place < texts.examples.length; place++) {
      const score = scores[place];
      if ((harmful ? score < 0 : score > 0) || state.search) if (wanted(texts.examples[place])) places.push(place);
    }
    places.sort((a, b) => (harmful ? scores[a] - scores[b] : scores[b] - scores[a]));
    return { places, scores };
  }

  renderTraining(state) {
    const texts = this.texts.train;
    const { places, scores } = this.ranked(texts, state);
    const total = texts.examples.length;
    this.list ??= element("ol", { class: "texts", "aria-label": "Training texts, ranked" });
    if (!this.search) {
      this.search = element("input", {
        type: "search",
        placeholder: "text, #12 or field:value",
        "aria-label": "Search training texts: text, #index or field:value",
        value: state.search ?? "",
        oninput: () => this.app.go({ search: this.search.value }),
      });
    }
    if (this.search.value !== (state.search ?? "")) this.search.value = state.search ?? "";
    const bar = element(
      "div",
      { class: "bar" },
      orderTabs(state, (order) => this.app.go({ order })),
      choice("by", [["text", "text"], ["token", "strongest token"]], state.by ?? "text", (by) => this.app.go({ by: by === "text" ? null : by })),
    );
    const head = element(
      "div",
      { class: "head" },
      legend(this.reach),
      bar,
      element("p", { class: "quiet" }, `${places.length.toLocaleString("en")} of ${plural(total, "training text")}${isReport ? " in this report" : ""}, ${texts.total.toLocaleString("en")} tokens; moving with ${this.describe()}`),
    );
    this.searchBar ??= element("div", { class: "bar search" }, this.search);
    if (this.head?.isConnected) this.head.replaceWith(head);
    else this.trainPane.replaceChildren(head, this.searchBar, this.list);
    this.head = head;
    this.trainPane.classList.remove("resting");
    this.fillList(this.list, texts, places, scores);
  }

  fillList(list, texts, places, scores) {
    const cards = [];
    let budget = this.limit;
    for (const [rank, place] of places.entries()) {
      budget -= texts.lengthOf(place);
      if (budget < 0 && rank > 0) break;
      cards.push(this.card(texts, place, scores[place], rank));
    }
    const shown = new Set(places.slice(0, cards.length));
    texts.colour(shown, this.byToken, this.reach);
    texts.trim(shown);
    this.mark();
    list.replaceChildren(...cards);
    if (cards.length < places.length) {
      const grow = () => {
        this.limit *= 2;
        this.fillList(list, texts, places, scores);
      };
      const left = (places.length - cards.length).toLocaleString("en");
      const more = element("button", { type: "button", class: "plain", onclick: grow }, `Show more (${left} left)`);
      list.append(element("li", { class: "more" }, more));
      this.observer?.disconnect();
      this.observer = new IntersectionObserver(([entry]) => entry.isIntersecting && grow(), { rootMargin: "400px" });
      this.observer.observe(more);
    }
    if (cards.length === 0) list.append(element("li", { class: "quiet" }, "None."));
    this.askErrors(texts, places.slice(0, cards.length));
  }

  card(texts, place, score, rank) {
    const example = texts.examples[place];
    const { box } = texts.tokensOf(place);
    const name = texts.set === "train" ? "train" : "query";
    return element(
      "li",
      { class: "card", "data-index": example.index },
      element(
        "div",
        { class: "card-head" },
        element("span", { class: "rank" }, `${rank + 1}`),
        element("b", {}, `${name} ${example.index}`),
        scoreOf(score, place),
        fields(example),
      ),
      box,
    );
  }

  // The Monte Carlo errors of the texts that are shown, a moment after their colours.
  async askErrors(texts, places) {
    const key = JSON.stringify(this.selected);
    if (this.app.state.by === "token" || places.length === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 120));
    if (JSON.stringify(this.selected) !== key) return;
    const answer = await this.errors("example", places.slice(0, 100)).catch(() => null);
    if (!answer?.errors || JSON.stringify(this.selected) !== key) return;
    const byPlace = new Map(places.slice(0, 100).map((place, number) => [String(place), answer.errors[number]]));
    for (const node of this.element.querySelectorAll(".error[data-place]")) {
      const error = byPlace.get(node.dataset.place);
      if (error !== undefined && error !== null) node.textContent = `± ${error.toFixed(2)}`;
    }
  }

  errors(level, columns) {
    const { set, sample, from, to } = this.selected;
    const parameters = { run: this.run.run, set, sample, level, columns: columns.join(",") };
    return ask("errors", { ...parameters, ...(from === undefined ? {} : { from, to }) });
  }

  renderReversed(state) {
    const texts = this.texts.query;
    const { places, scores } = this.ranked(texts, { ...state, search: "" });
    this.queryList ??= element("ol", { class: "texts", "aria-label": "Queries, ranked" });
    const back = () => this.app.go({ train: null, token: null });
    this.queryPane.replaceChildren(
      element("div", { class: "bar" }, element("button", { type: "button", class: "plain", onclick: back }, "‹ Back to the query"), orderTabs(state, (order) => this.app.go({ order }))),
      element("p", { class: "chosen" }, "The other way round. Chosen: ", element("b", {}, this.describe())),
      legend(this.reach),
      this.queryList,
    );
    this.fillList(this.queryList, texts, places, scores);
    const train = this.texts.train;
    const place = train.place.get(this.selected.sample);
    if (!this.list) {
      this.list = element("ol", { class: "texts", "aria-label": "Training texts" });
      this.trainPane.replaceChildren(this.list);
    }
    const { box } = train.tokensOf(place);
    if (!box.isConnected) {
      const index = train.examples[place].index;
      this.list.replaceChildren(
        element("li", { class: "card", "data-index": index }, element("div", { class: "card-head" }, element("b", {}, `train ${index}`), fields(train.examples[place])), box),
      );
    }
    this.trainPane.classList.add("resting");
    this.mark();
  }

  // Pointer: press and release on one token chooses it, on two the span between them.
  press(event) {
    const token = event.target.closest?.(".token");
    if (!token || token.column === undefined || event.button !== 0) return;
    if (token.set === "query") {
      event.preventDefault();
      token.focus({ preventScroll: true });
      const anchor = event.shiftKey && this.selected.set === "query" && this.selected.from !== undefined ? this.selected.from : token.position;
      this.dragging = { place: token.place, anchor };
      this.choose(token.place, anchor, token.position);
    } else {
      this.reverse(token);
    }
  }

  release() {
    this.dragging = null;
  }

  choose(place, one, other) {
    const index = this.texts.query.examples[place].index;
    const from = Math.min(one, other);
    const to = Math.max(one, other);
    this.refocus = () => this.texts.query.tokensOf(place).tokens[other];
    this.app.go({ query: index, from, to: to === from ? null : to, train: null, token: null });
  }

  reverse(token) {
    const example = this.texts.train.examples[token.place];
    this.refocus = () => this.texts.train.made.get(token.place)?.tokens[token.position];
    this.app.go({ train: example.index, token: token.position, query: this.app.state.query }, { remember: true });
  }

  over(event) {
    const token = event.target.closest?.(".token");
    if (!token || token.column === undefined) return this.hideTip();
    if (this.dragging && token.set === "query" && token.place === this.dragging.place) {
      this.choose(token.place, this.dragging.anchor, token.position);
    }
    this.tell(token);
  }

  focus(event) {
    const token = event.target.closest?.(".token");
    if (token && token.column !== undefined) this.tell(token);
  }

  hideTip() {
    this.tip.hidden = true;
    this.told = null;
  }

  // Exact value, standard error and rank of one token.
  async tell(token) {
    if (this.told === token || !this.byToken) return;
    const coloured = this.selected.set === "query" ? "train" : "query";
    if (token.set !== coloured) return this.hideTip();
    this.told = token;
    const selected = JSON.stringify(this.selected);
    const changed = () => this.told !== token || JSON.stringify(this.selected) !== selected;
    const value = this.byToken[token.column];
    this.ranks ??= new Ranks(this.byToken);
    const rank = `rank ${this.ranks.of(value).toLocaleString("en")} of ${plural(this.byToken.length, "token")}`;
    const name = token.textContent.trim() || "␣";
    const say = (error, ...from) => {
      const number = `${signed(value, 4)}${error}`;
      this.tip.replaceChildren(element("b", {}, name), ` ${number}`, element("br"), rank, ...from);
      this.tip.hidden = false;
      const box = token.getBoundingClientRect();
      const own = this.tip.getBoundingClientRect();
      this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
      this.tip.style.top = `${box.top > own.height + 12 ? box.top - own.height - 6 : box.bottom + 6}px`;
      this.status.textContent = `${name}: ${number}, ${rank}`;
    };
    say("");
    await new Promise((resolve) => setTimeout(resolve, 60));
    if (changed()) return;
    const answer = await this.errors("token", [token.column]).catch(() => null);
    if (changed() || !answer?.errors) return;
    const batches = `error from ${answer.batches} batches of draws`;
    say(` ± ${answer.errors[0].toFixed(4)}`, element("br"), batches);
  }

  key(event) {
    const token = event.target.closest?.(".token");
    const inTraining = token && token.set === "train";
    if (token && event.key === "Enter" && inTraining) {
      event.preventDefault();
      return this.reverse(token);
    }
    if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      event.preventDefault();
      if (token && (inTraining || this.selected.set === "train")) return this.walk(token, event.key);
      return this.move(event.key, event.shiftKey);
    }
    const actions = {
      Escape: () => this.app.go({ from: null, to: null, train: null, token: null }),
      "[": () => this.step(-1),
      "]": () => this.step(1),
      h: () => this.app.go({ order: null }),
      x: () => this.app.go({ order: "harmful" }),
      "/": () => this.search?.focus(),
    };
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  }

  walk(token, key) {
    const { scored } = this.texts[token.set].tokensOf(token.place);
    const next = scored[target(key, scored.indexOf(token), scored.length)];
    for (const one of scored) one.tabIndex = one === next ? 0 : -1;
    next.focus();
  }

  move(key, extend) {
    if (this.selected.set !== "query") return this.app.go({ train: null, token: null });
    const place = this.texts.query.place.get(this.selected.sample);
    const { scored } = this.texts.query.tokensOf(place);
    const positions = scored.map((token) => token.position);
    const { from, to } = this.selected;
    if (from === undefined) {
      const first = positions[key === "ArrowLeft" || key === "End" ? positions.length - 1 : 0];
      this.anchor = this.moving = first;
      return this.choose(place, first, first);
    }
    const known = this.anchor !== undefined && Math.min(this.anchor, this.moving) === from && Math.max(this.anchor, this.moving) === to;
    if (!known) [this.anchor, this.moving] = [from, to];
    this.moving = positions[target(key, positions.indexOf(this.moving), positions.length)];
    if (!extend) this.anchor = this.moving;
    this.choose(place, this.anchor, this.moving);
  }
}

function target(key, at, count) {
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  return Math.max(0, Math.min(count - 1, at + (key === "ArrowLeft" ? -1 : 1)));
}

function orderTabs(state, choose) {
  const harmful = state.order === "harmful";
  const tab = (name, pressed, order) =>
    element("button", { type: "button", class: `tab ${name.toLowerCase()}`, "aria-pressed": String(pressed), onclick: () => choose(order) }, name);
  return element("span", { class: "tabs", role: "group", "aria-label": "Order" }, tab("Helpful", !harmful, null), tab("Harmful", harmful, "harmful"));
}

function scoreOf(score, place) {
  return element(
    "span",
    { class: `score ${score > 0 ? "helps-text" : "harms-text"}` },
    signed(score),
    " ",
    element("span", { class: "error", "data-place": place }),
  );
}

function fields(example) {
  const shown = Object.entries(example.fields);
  if (shown.length === 0) return null;
  return element(
    "span",
    { class: "fields" },
    shown.slice(0, 6).map(([name, value]) => element("span", { class: "field" }, `${name}: ${fieldText(value)}`)),
  );
}
