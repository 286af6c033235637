// Questions to the server or, in a report, to the answers that were written into the page.

import { LocalAnswers } from "jostle/local.js";

export class Refused extends Error {}

const written = document.getElementById("jostle-answers");
const local = written ? new LocalAnswers(JSON.parse(written.textContent)) : null;

export const isReport = local !== null;
export const start = local ? local.start : {};

async function get(question, parameters) {
  const response = await fetch(`api/${question}?${new URLSearchParams(parameters)}`);
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error;
  } catch {
    // The status has to do.
  }
  throw new Refused(message);
}

export async function ask(question, parameters = {}) {
  if (local) return local.ask(question, parameters);
  return (await get(question, parameters)).json();
}

export async function askNumbers(question, parameters) {
  if (local) return local.numbers(question, parameters);
  return new Float32Array(await (await get(question, parameters)).arrayBuffer());
}

export async function askPixels(parameters) {
  if (local) return local.pixels(parameters);
  return new Uint8Array(await (await get("images", parameters)).arrayBuffer());
}
