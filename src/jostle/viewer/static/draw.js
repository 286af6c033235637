// Small pictures of numbers, as SVG: axes with round numbers, and lines, bands, bars or points in them.

import { compact, element, svg } from "jostle/dom.js";

// On a narrow screen a picture is drawn narrow, rather than drawn wide and made small.
const narrow = () => innerWidth < 760;

export class Plot {
  constructor({ title, about, x, y, height = 250, width = 370, equal = false, role = "img" }) {
    this.size = { width: narrow() ? Math.min(width, 370) : width, height: narrow() ? Math.min(height, 300) : height, left: 58, right: 12, top: 10, bottom: 40 };
    this.marks = [];
    this.labels = { x, y };
    this.title = title;
    this.about = about;
    this.equal = equal;
    this.role = role;
    this.bounds = { x: [Infinity, -Infinity], y: [Infinity, -Infinity] };
  }

  include(axis, values) {
    const bounds = this.bounds[axis];
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < bounds[0]) bounds[0] = value;
      if (value > bounds[1]) bounds[1] = value;
    }
    return this;
  }

  add(mark, xs, ys) {
    this.include("x", xs).include("y", ys);
    this.marks.push(mark);
    return this;
  }

  line(xs, ys, attributes) {
    return this.add(() => {
      let path = "";
      let pen = "M";
      xs.forEach((x, place) => {
        if (ys[place] === null || !Number.isFinite(ys[place])) return (pen = "M");
        path += `${pen}${this.x(x).toFixed(1)} ${this.y(ys[place]).toFixed(1)}`;
        pen = "L";
      });
      return svg("path", { d: path, fill: "none", ...attributes });
    }, xs, ys);
  }

  band(xs, low, high, attributes) {
    return this.add(() => {
      const there = xs.map((x, place) => `${this.x(x).toFixed(1)} ${this.y(high[place]).toFixed(1)}`);
      const back = xs.map((x, place) => `${this.x(x).toFixed(1)} ${this.y(low[place]).toFixed(1)}`).reverse();
      return svg("path", { d: `M${[...there, ...back].join("L")}Z`, ...attributes });
    }, xs, [...low, ...high]);
  }

  bars(edges, counts, attributes) {
    return this.add(() => {
      const rows = counts.map((count, place) => {
        const left = this.x(edges[place]);
        return svg("rect", { x: left + 0.5, width: Math.max(1, this.x(edges[place + 1]) - left - 1), y: this.y(count), height: this.y(0) - this.y(count) });
      });
      return svg("g", attributes, rows);
    }, edges, [0, ...counts]);
  }

  points(xs, ys, make) {
    return this.add(() => svg("g", {}, xs.map((x, place) => make(this.x(x), this.y(ys[place]), place))), xs, ys);
  }

  level(value, attributes) {
    return this.add(() => {
      const { left, width, right } = this.size;
      return svg("line", { x1: left, x2: width - right, y1: this.y(value), y2: this.y(value), ...attributes });
    }, [], [value]);
  }

  upright(value, attributes) {
    return this.add(() => {
      const { top, height, bottom } = this.size;
      return svg("line", { x1: this.x(value), x2: this.x(value), y1: top, y2: height - bottom, ...attributes });
    }, [value], []);
  }

  diagonal() {
    this.marks.push(() => {
      const low = Math.max(this.bounds.x[0], this.bounds.y[0]);
      const high = Math.min(this.bounds.x[1], this.bounds.y[1]);
      return svg("line", { x1: this.x(low), y1: this.y(low), x2: this.x(high), y2: this.y(high), class: "axis" });
    });
    return this;
  }

  fit() {
    for (const axis of ["x", "y"]) {
      let [low, high] = this.bounds[axis];
      if (!Number.isFinite(low)) [low, high] = [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.04;
      this.bounds[axis] = [axis === "y" && low === 0 ? 0 : low - room, high + room];
    }
    if (this.equal) {
      const reach = Math.max(...[...this.bounds.x, ...this.bounds.y].map(Math.abs));
      this.bounds = { x: [-reach, reach], y: [-reach, reach] };
    }
    const { width, height, right, top, bottom } = this.size;
    this.levels = ticks(this.bounds.y, Math.max(3, Math.round(height / 60)));
    const left = (this.size.left = 32 + 7 * Math.max(...this.levels.map((value) => compact(value).length), 1));
    const scale = ([low, high], from, to) => (value) => from + ((value - low) / (high - low)) * (to - from);
    this.x = scale(this.bounds.x, left, width - right);
    this.y = scale(this.bounds.y, height - bottom, top);
  }

  draw() {
    this.fit();
    const { width, height, left, right, top, bottom } = this.size;
    const parts = [];
    for (const value of this.levels) {
      parts.push(svg("line", { class: "grid", x1: left, x2: width - right, y1: this.y(value), y2: this.y(value) }));
      parts.push(svg("text", { x: left - 6, y: this.y(value) + 4, "text-anchor": "end" }, compact(value)));
    }
    for (const value of ticks(this.bounds.x, Math.max(4, Math.round(width / 110)))) {
      parts.push(svg("line", { class: "tick", x1: this.x(value), x2: this.x(value), y1: height - bottom, y2: height - bottom + 4 }));
      parts.push(svg("text", { x: this.x(value), y: height - bottom + 17, "text-anchor": "middle" }, compact(value)));
    }
    parts.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    parts.push(svg("text", { class: "label", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, this.labels.x));
    parts.push(
      svg("text", { class: "label", transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, this.labels.y),
    );
    parts.push(...this.marks.map((mark) => mark()));
    return element(
      "figure",
      { class: "plot" },
      element("figcaption", {}, element("b", {}, this.title), this.about ? element("span", { class: "quiet" }, ` ${this.about}`) : null),
      svg("svg", { viewBox: `0 0 ${width} ${height}`, role: this.role, "aria-label": `${this.title}. ${this.about ?? ""}` }, parts),
    );
  }
}

function ticks([low, high], count) {
  const rough = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const values = [];
  for (let number = Math.ceil(low / step); number * step <= high; number++) values.push(Number((number * step).toPrecision(12)));
  return values;
}

// Keys of points in the plane: an arrow goes to the nearest in its direction, Enter opens.
export function walk(event, points, open) {
  const point = points.find((one) => one === event.target);
  const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!point || !(direction || event.key === "Enter" || event.key === " ")) return;
  event.preventDefault();
  if (!direction) return open(point.dataset.index);
  let best = null;
  let least = Infinity;
  for (const other of points) {
    const right = other.cx.baseVal.value - point.cx.baseVal.value;
    const down = other.cy.baseVal.value - point.cy.baseVal.value;
    const along = right * direction[0] + down * direction[1];
    const across = Math.abs(right * direction[1]) + Math.abs(down * direction[0]);
    if (along > 0.5 && along + 2 * across < least) [best, least] = [other, along + 2 * across];
  }
  if (!best) return;
  point.tabIndex = -1;
  best.tabIndex = 0;
  best.focus();
}
