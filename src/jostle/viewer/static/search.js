// What a search finds, among texts and images alike.

import { wholeText } from "jostle/dom.js";

// "#12" is an index, "name:value" a field that contains it, anything else stands in the text.
export function matcher(search) {
  const wanted = search.trim().toLowerCase();
  if (!wanted) return () => true;
  if (/^#\d+$/.test(wanted)) return (example) => example.index === Number(wanted.slice(1));
  const colon = wanted.indexOf(":");
  return (example) => {
    if (colon > 0) {
      for (const [name, value] of Object.entries(example.fields)) {
        if (name.toLowerCase() === wanted.slice(0, colon) && wholeText(value).toLowerCase().includes(wanted.slice(colon + 1).trim())) return true;
      }
    }
    return (example.text ?? "").toLowerCase().includes(wanted);
  };
}
