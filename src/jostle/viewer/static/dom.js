// Elements from data. Text is only ever set as text: what comes out of a data set is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const shown = Math.abs(value).toFixed(digits);
  return (value < 0 && Number(shown) !== 0 ? "−" : "+") + shown;
}

export function compact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function plural(count, word) {
  return `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
}

// What to call an example where there is room for a few words only.
export function excerpt(example, width = 60) {
  const label = example.fields.label ?? example.fields.name;
  const text = (example.text ?? (label === undefined ? "" : String(label))).replace(/\s+/g, " ").trim();
  return text.length > width ? text.slice(0, width - 1) + "…" : text;
}

export function wholeText(value) {
  return typeof value === "object" && value !== null ? JSON.stringify(value) : String(value);
}

export function fieldText(value) {
  const text = wholeText(value);
  return text.length > 80 ? text.slice(0, 79) + "…" : text;
}

export function choice(label, options, chosen, onchange) {
  const select = element("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of options) {
    select.append(element("option", { value, selected: String(value) === String(chosen) }, text));
  }
  return element("label", { class: "choice" }, element("span", {}, label), select);
}
