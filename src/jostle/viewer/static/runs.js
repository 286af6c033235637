// Runs, and other scores, beside each other.

// What else scores the same training examples for the same queries.
export function comparable(run, runs) {
  const same = (other) => other.sizes?.train === run.sizes?.train && other.sizes?.query === run.sizes?.query;
  return run.sizes ? runs.filter((other) => other.run !== run.run && other.sizes && same(other)) : [];
}

// Why there is nothing to compare a run with.
export function incomparable(run, runs) {
  const sizes = (one) => `${one.name}: ${one.sizes ? `${one.sizes.train} and ${one.sizes.query}` : "not readable yet"}`;
  const listed = [run, ...runs.filter((other) => other.run !== run.run)].map(sizes).join("; ");
  return `Nothing to compare with: scores are compared for the same training examples and the same queries, and their numbers differ (${listed}).`;
}

export function methodName(run) {
  return run.method === "bif" ? "Bayesian influence" : run.method;
}
