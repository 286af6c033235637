// The colours of a correlation: blue where losses move together, orange where they move against each other.

import { element, signed } from "jostle/dom.js";

const READ = 20000; // of more values than this, some are as good as all

// The strength at which the colour is full: what all but one in two hundred stay below, so that one odd token does not
// make all others pale.
export function reachOf(values) {
  if (values.length === 0) return 1;
  const step = Math.ceil(values.length / READ);
  const sizes = new Float32Array(Math.ceil(values.length / step));
  for (let place = 0; place < sizes.length; place++) sizes[place] = Math.abs(values[place * step]);
  sizes.sort();
  const reach = sizes[Math.floor((sizes.length - 1) * 0.995)];
  return reach > 0 ? reach : 1;
}

export function paint(node, value, reach) {
  if (value === undefined || Number.isNaN(value)) return clear(node);
  const strength = Math.min(1, Math.abs(value) / reach);
  node.classList.toggle("helps", value > 0);
  node.classList.toggle("harms", value < 0);
  node.style.setProperty("--strength", strength.toFixed(3));
}

export function clear(node) {
  node.classList.remove("helps", "harms");
  node.style.removeProperty("--strength");
}

export function legend(reach, about) {
  const end = (side) => element("span", { class: "number" }, `${side < 0 ? "≤" : "≥"} ${signed(side * reach)}`);
  return element(
    "div",
    { class: "legend" },
    element("span", { class: "legend-title" }, about ?? "Posterior correlation"),
    element("span", { class: "ramp" }, end(-1), element("span", { class: "gradient", "aria-hidden": "true" }), end(1)),
    element(
      "span",
      {},
      element("b", { class: "helps-text" }, "Blue, positive"),
      ": the losses move together, training on it helps. ",
      element("b", { class: "harms-text" }, "Orange, negative"),
      ": it harms.",
    ),
  );
}

// How many of the values are larger: the first has rank 1.
export class Ranks {
  constructor(values) {
    this.sorted = Float32Array.from(values).sort();
  }

  of(value) {
    let low = 0;
    let high = this.sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.sorted[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return this.sorted.length - low + 1;
  }
}
