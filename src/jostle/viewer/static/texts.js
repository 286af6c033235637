// Texts as elements, one for each token, that are made once and coloured again and again.

import { element } from "jostle/dom.js";
import { clear, paint } from "jostle/scale.js";

const KEPT_TOKENS = 30000; // as elements, to be coloured again

export class Texts {
  constructor(set, examples) {
    this.set = set;
    this.examples = examples;
    this.offsets = [0];
    for (const example of examples) this.offsets.push(this.offsets.at(-1) + example.positions.length);
    this.place = new Map(examples.map((example, place) => [example.index, place]));
    this.made = new Map();
  }

  get total() {
    return this.offsets.at(-1);
  }

  lengthOf(place) {
    return this.examples[place].tokens.length;
  }

  // One element for each token; those that have a loss can be chosen.
  tokensOf(place) {
    if (this.made.has(place)) return this.made.get(place);
    const example = this.examples[place];
    const column = new Map(example.positions.map((position, number) => [position, this.offsets[place] + number]));
    const tokens = example.tokens.map((token, position) => {
      const scored = column.has(position);
      const node = element(
        "span",
        {
          class: "token",
          role: "option",
          "aria-selected": "false",
          "aria-disabled": scored ? null : "true",
          tabindex: scored ? "-1" : null,
        },
        bare(token),
      );
      node.place = place;
      node.position = position;
      node.column = column.get(position);
      node.set = this.set;
      return node;
    });
    const about = this.set === "train" ? `Training text ${example.index}` : `Query ${example.index}`;
    // Spaces stand between the tokens and not in them, so that a line never breaks inside a coloured box.
    const parts = tokens.flatMap((node, position) => [spaceBefore(example.tokens[position]), node]);
    const box = element("div", { class: "text", dir: "auto", role: "listbox", "aria-label": `${about}, tokens`, "aria-multiselectable": "true" }, parts);
    const scored = tokens.filter((token) => token.column !== undefined);
    if (scored.length) scored[0].tabIndex = 0;
    const made = { box, tokens, scored };
    this.made.set(place, made);
    return made;
  }

  // Those that are shown, and no others: the rest is coloured when it is shown again.
  colour(places, values, reach) {
    for (const place of places) {
      for (const token of this.tokensOf(place).scored) paint(token, values[token.column], reach);
    }
  }

  // For each text its largest value or, where the harmful are asked for, its smallest.
  strongest(values, harmful) {
    return this.examples.map((_, place) => {
      const own = values.subarray(this.offsets[place], this.offsets[place + 1]);
      return own.reduce((best, value) => (harmful ? Math.min(best, value) : Math.max(best, value)), harmful ? Infinity : -Infinity);
    });
  }

  fade() {
    for (const { scored } of this.made.values()) for (const token of scored) clear(token);
  }

  // Let go of what has not been shown for long, where there is too much.
  trim(shown) {
    let kept = 0;
    for (const [place, { tokens }] of [...this.made].reverse()) {
      kept += tokens.length;
      if (kept > KEPT_TOKENS && !shown.has(place)) this.made.delete(place);
    }
  }
}

function spaceBefore(token) {
  return token.trim() === "" ? "" : token.slice(0, token.length - token.trimStart().length);
}

function bare(token) {
  return (token.trim() === "" ? token : token.trimStart()).replace(/\r?\n/g, "↵\n");
}
