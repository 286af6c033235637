// Whether the scores can be trusted: the verdict, what to do, and what it rests on; live while sampling.

import { ask } from "jostle/api.js";
import { compact, duration, element, plural, svg } from "jostle/dom.js";
import { Plot } from "jostle/draw.js";

const SHOWN_CHAINS = 12;

export class HealthView {
  constructor(app, run) {
    this.app = app;
    this.run = run;
    this.element = element("div", { class: "health-view" }, element("p", { class: "quiet" }, "Computing the diagnostics…"));
  }

  forget() {
    this.health = undefined;
  }

  async update() {
    if (this.health) return;
    const health = await ask("health", { run: this.run.run });
    this.health = health;
    this.element.replaceChildren(
      ...[progress(health.progress), verdict(health), element("div", { class: "plots" }, plots(health)), numbers(health), settings(health)].filter(Boolean),
    );
    this.element.dataset.ready = "true";
  }
}

function progress(now) {
  if (!now) return null;
  const share = now.total ? now.steps / now.total : 0;
  const left = now.rests
    ? `nothing was written for ${duration(now.seconds_since_written)}: interrupted, perhaps; the command that began it goes on`
    : now.seconds_left === null ? "time left: not known yet" : `about ${duration(now.seconds_left)} left`;
  return element(
    "section",
    { class: "card progress", "aria-label": "Progress" },
    element("h2", {}, "Still sampling"),
    element("progress", { max: 1, value: share, "aria-label": "Steps done" }),
    element("p", {}, `${now.steps.toLocaleString("en")} of ${now.total.toLocaleString("en")} steps (${Math.floor(100 * share)} %), `, element("b", { class: "time-left" }, left)),
    element("p", { class: "quiet" }, `draws written of each chain: ${now.draws.join(", ")}`),
  );
}

function verdict({ diagnostics, progress: now }) {
  if (!diagnostics) {
    return element("section", { class: "card" }, element("h2", {}, "Verdict"), element("p", {}, "Too few draws yet to judge."));
  }
  const { level, summary, reasons, hint } = diagnostics.verdict;
  const colon = summary.indexOf(": ");
  return element(
    "section",
    { class: `card verdict ${level}`, "aria-label": "Verdict" },
    element("h2", {}, now ? `So far: ${level}` : level[0].toUpperCase() + level.slice(1)),
    element("p", { class: "summary" }, summary.slice(colon + 2)),
    // The first of several reasons may be all of the summary.
    reasons.length > 1
      ? element("ul", {}, reasons.filter((reason) => !summary.includes(reason.finding)).map((reason) => element("li", {}, element("b", { class: reason.level }, reason.level), `: ${reason.finding}; ${reason.advice}`)))
      : null,
    hint ? element("p", {}, `Hint: ${hint}`) : null,
    diagnostics.failed_chains.length
      ? element("p", {}, element("b", {}, "Failed: "), diagnostics.failed_chains.map((one) => `chain ${one.chain} at step ${one.step} (${one.reason})`).join("; "))
      : null,
    diagnostics.remarks.map((remark) => element("p", { class: "quiet" }, remark)),
  );
}

function plots({ curves, diagnostics, progress: now, settings: { thin } }) {
  if (!curves) return [];
  const figures = [];
  const chains = curves.mean_loss;
  const losses = new Plot({
    title: "Mean training loss along the chains",
    about: chains.length > SHOWN_CHAINS ? `${SHOWN_CHAINS} of ${chains.length} chains` : plural(chains.length, "chain"),
    x: "step", y: "mean loss (nats)", width: 1140, height: 280,
  });
  const step = Math.max(1, Math.ceil(chains.length / SHOWN_CHAINS));
  chains.forEach((values, chain) => {
    if (chain % step && curves.chains.includes(chain)) return;
    const lost = !curves.chains.includes(chain);
    losses.line(curves.steps, values, { class: "line", stroke: `var(--chain-${(chain / step) % 8 | 0})`, "stroke-dasharray": lost ? "4 3" : null });
  });
  losses.level(curves.center_loss, { class: "reference" });
  const wide = losses.draw();
  wide.classList.add("wide");
  wide.append(
    element(
      "p",
      { class: "keys" },
      chains.flatMap((_, chain) => (chain % step ? [] : [
        element("span", { class: "key" }, element("span", { class: "swatch", style: `background: var(--chain-${(chain / step) % 8 | 0})` }), `chain ${chain}${curves.chains.includes(chain) ? "" : now ? " (not used yet)" : " (not used)"}`),
      ])),
      element("span", { class: "key" }, element("span", { class: "swatch dotted" }), `at w*: ${compact(curves.center_loss)}`),
    ),
  );
  figures.push(wide);
  if (curves.autocorrelation) {
    const [low, middle, high] = curves.autocorrelation;
    const lags = middle.map((_, lag) => lag);
    const time = diagnostics?.autocorrelation_time;
    figures.push(
      new Plot({ title: "Autocorrelation of losses", about: `${time ? `${time.toFixed(1)} draws for each effective one; ` : ""}band: 80 % of the examples`, x: `lag in draws (${plural(thin, "step")} each)`, y: "autocorrelation", width: 370, height: 250 })
        .band(lags, low, high, { class: "band" }).line(lags, middle, { class: "line", stroke: "var(--chain-0)" }).level(0, { class: "axis" }).draw(),
    );
  }
  if (curves.effective) {
    const { counts, edges, draws } = curves.effective;
    figures.push(
      new Plot({ title: "Effective draws by example", about: `dotted: all ${draws} draws`, x: "bulk ESS", y: "examples", width: 370, height: 250 })
        .include("x", [0]).bars(edges, counts, { class: "bars" }).upright(draws, { class: "reference" }).draw(),
    );
  }
  if (curves.halves) {
    const rank = diagnostics?.agreement?.halves?.spearman;
    figures.push(
      new Plot({ title: "Scores from halves of the draws", about: rank ? `Spearman ${rank.toFixed(2)}` : "", x: "posterior correlation, first half", y: "last half", equal: true, width: 370, height: 250 })
        .points(...curves.halves, (x, y) => svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 2, class: "dot" })).diagonal().draw(),
    );
  }
  return figures;
}

function numbers({ diagnostics: found, kappa }) {
  if (!found) return null;
  const rows = [];
  const row = (name, value, meaning) => value !== null && value !== undefined && rows.push([name, value, meaning]);
  row("Chains × draws", `${found.chains} × ${found.draws}`, found.failed_chains.length ? `${found.failed_chains.length} failed and are left out` : "");
  if (found.mean_loss !== undefined) row("Mean loss", compact(found.mean_loss), `${compact(found.mean_loss_at_center)} at w*: it rose by ${compact(found.rise)} nats`);
  if (found.effective_draws) row("Effective draws", Math.round(found.effective_draws).toLocaleString("en"), `a correlation is known to ± ${(found.effective_draws ** -0.5).toFixed(2)}`);
  for (const [name, title] of [["losses", "Losses"], ["products", "Products of losses"], ["tokens", "Losses of tokens"], ["token_products", "Products of tokens"]]) {
    const one = found[name];
    if (one?.r_hat) row(`R-hat, ${title.toLowerCase()}`, one.r_hat.toFixed(3), `worst ${one.r_hat_max.toFixed(3)}; ESS bulk ${Math.round(one.ess_bulk)}, tail ${Math.round(one.ess_tail)}`);
  }
  if (found.between_chain_share) row("Variance between chains", `${(100 * found.between_chain_share).toFixed(1)} %`, "about one over the effective draws of a chain, when chains agree");
  if (found.drift?.standard_errors) row("Drift of the mean loss", `${compact(found.drift.change)} nats`, `${found.drift.standard_errors.toFixed(1)} standard errors`);
  const coefficient = found.local_learning_coefficient;
  if (coefficient?.value) row("Local learning coefficient", compact(coefficient.value), coefficient.standard_error ? `± ${compact(coefficient.standard_error)}` : "");
  const heat = found.temperature;
  if (heat?.value) row("Temperature", compact(heat.value), `${heat.standard_error ? `± ${compact(heat.standard_error)}; ` : ""}1 is that of the target`);
  if (found.kappa_support) {
    const each = Object.entries(found.kappa_support).map(([kappa, support]) => `${kappa}: ${support.toFixed(2)}`).join(", ");
    row("Supported κ", compact(found.kappa), `support of ${each}; --kappa auto reads there, and this page ${kappa ? `at ${compact(kappa)}` : "as it was sampled"}`);
  }
  return table("What it rests on", rows);
}

function settings({ settings: chosen, seconds, device }) {
  const { sampler, posterior, ...counts } = chosen;
  const rows = [
    ["Sampler", sampler.name, Object.entries(sampler).filter(([name]) => name !== "name").map(([name, value]) => `${name} ${value}`).join(", ")],
    ["Posterior", `nβ ${compact(posterior.n_beta)}, γ ${compact(posterior.localization)}`, `weights: ${posterior.weights}`],
    ...Object.entries(counts).map(([name, value]) => [name.replace("_", " "), String(value), ""]),
  ];
  if (seconds?.sampling) rows.push(["Sampling took", duration(seconds.sampling), device ? `on ${device}` : ""]);
  return table("Settings", rows);
}

function table(title, rows) {
  return element(
    "section",
    { class: "card" },
    element("h2", {}, title),
    element("table", { class: "numbers" }, element("tbody", {}, rows.map(([name, value, meaning]) =>
      element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number" }, value), element("td", { class: "quiet" }, meaning))))),
  );
}
