// The answers of a report: some queries and training examples, and every correlation between them.

export class LocalAnswers {
  constructor(data) {
    this.data = data;
    this.start = data.start;
  }

  key(question, parameters) {
    const names = Object.keys(parameters).sort();
    return `${question}?${names.map((name) => `${name}=${parameters[name]}`).join("&")}`;
  }

  ask(question, parameters) {
    if (question === "errors") return this.errors(parameters);
    const answer = this.data.answers[this.key(question, parameters)];
    if (answer === undefined) throw new Error("this is not part of the report; open the run with jostle view");
    if (answer.refused !== undefined) throw new Error(answer.refused);
    return answer;
  }

  // A block holds, for one query, a row for its mean loss and one for each of its scored tokens; in each row the
  // correlations with the examples that are shown, and then those with their tokens.
  block(run, query) {
    const block = this.data.blocks[`${run} ${query}`];
    if (block === undefined) throw new Error("this query is not part of the report");
    block.values ??= numbers(block.rows);
    block.deviations ??= block.errors === null ? null : numbers(block.errors);
    return block;
  }

  row(block, values, number) {
    return values.subarray(number * block.width, (number + 1) * block.width);
  }

  numbers(question, parameters) {
    if (parameters.set === "train") return this.reversed(parameters);
    const block = this.block(parameters.run, parameters.sample);
    if (parameters.from === undefined) return this.row(block, block.values, 0);
    const inside = this.inside(block, parameters);
    if (inside.length === 1) return this.row(block, block.values, inside[0] + 1);
    return this.sum(block, inside);
  }

  inside(block, { from, to }) {
    return block.positions.flatMap((position, place) => (position >= from && position <= (to ?? from) ? [place] : []));
  }

  // corr(Σ ℓₛ, x) = Σ σₛ·corr(ℓₛ, x) / σ(Σ ℓₛ), from the covariance of the query's own tokens.
  sum(block, inside) {
    const count = block.positions.length;
    block.covariance ??= numbers(block.own);
    let variance = 0;
    for (const a of inside) for (const b of inside) variance += block.covariance[a * count + b];
    const total = new Float32Array(block.width);
    if (variance <= 0) return total;
    for (const place of inside) {
      const weight = Math.sqrt(block.covariance[place * count + place] / variance);
      const row = this.row(block, block.values, place + 1);
      for (let column = 0; column < block.width; column++) total[column] += weight * row[column];
    }
    return total;
  }

  reversed({ run, sample, from }) {
    const shown = this.ask("examples", { run, set: "train" }).examples;
    const queries = this.ask("examples", { run, set: "query" }).examples;
    let column = shown.findIndex((example) => example.index === Number(sample));
    if (from !== undefined) {
      const place = shown[column].positions.indexOf(Number(from));
      const before = shown.slice(0, column).reduce((sum, example) => sum + example.positions.length, 0);
      column = shown.length + before + place;
    }
    const blocks = queries.map((query) => this.block(run, query.index));
    const examples = blocks.map((block) => block.values[column]);
    const tokens = blocks.flatMap((block) =>
      block.positions.map((_, place) => block.values[(place + 1) * block.width + column]),
    );
    return Float32Array.from([...examples, ...tokens]);
  }

  errors(parameters) {
    const none = { errors: null, batches: null };
    if (parameters.set === "train") return none;
    const block = this.block(parameters.run, parameters.sample);
    const inside = parameters.from === undefined ? [-1] : this.inside(block, parameters);
    if (block.deviations === null || inside.length !== 1) return none;
    const row = this.row(block, block.deviations, inside[0] + 1);
    const first = parameters.level === "token" ? block.examples : 0;
    const errors = parameters.columns.split(",").map((column) => row[first + Number(column)]);
    return { errors, batches: block.batches };
  }

  pixels({ run, set, indices }) {
    const images = this.data.images[`${run} ${set}`];
    const parts = indices.split(",").map((index) => bytes(images[index]));
    const size = parts[0].length;
    const all = new Uint8Array(size * parts.length);
    parts.forEach((part, place) => all.set(part, place * size));
    return all;
  }
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function numbers(text) {
  return new Float32Array(bytes(text).buffer);
}
