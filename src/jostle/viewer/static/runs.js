// Runs, and other scores, beside each other.

// What else scores the same training examples for the same queries.
export function comparable(run, runs) {
  const same = (other) => other.sizes?.train === run.sizes?.train && other.sizes?.query === run.sizes?.query;
  return run.sizes ? runs.filter((other) => other.run !== run.run && other.sizes && same(other)) : [];
}

export function methodName(run) {
  return run.method === "bif" ? "Bayesian influence" : run.method;
}
