// Attention that remembers: every number of a head knows its formula and what it was made from.
// Both the model's numbers and the worked example are such an engine.
//
// Names: xq xk incoming vectors · Wq Wk Wv Wo, bq bk bv bo · q k v · scores scaled visible weights · z heads out

const NICE = {
  xq: "x", xk: "X", Wq: "W^Q", Wk: "W^K", Wv: "W^V", Wo: "W^O", bq: "b^Q", bk: "b^K", bv: "b^V", bo: "b^O", q: "q", k: "k", v: "v",
  scores: "s", scaled: "s′", weights: "a", z: "z", heads: "h", out: "o", token: "e", position: "p", bias: "r",
};

class Engine {
  /** arrays: name -> { shape: [rows, cols], values }; about: labels and settings. */
  constructor(arrays, about) {
    this.arrays = arrays;
    this.about = about;
  }

  has(name) {
    return name in this.arrays;
  }

  shape(name) {
    const { shape } = this.arrays[name];
    return shape.length === 1 ? [1, shape[0]] : shape;
  }

  get(name, row, col) {
    return this.arrays[name].values[row * this.shape(name)[1] + col];
  }

  /** A matrix product with bias, kept as one term for each inner index. */
  product(name, row, col, left, weight, bias) {
    const inner = this.shape(weight)[0];
    const terms = Array.from({ length: inner }, (_, i) => [[left, row, i], [weight, i, col]]);
    if (bias && this.has(bias)) terms.push([[bias, 0, col]]);
    return { formula: `${NICE[name]} = ${NICE[left]} ${NICE[weight]}${bias && this.has(bias) ? ` + ${NICE[bias]}` : ""}`, terms };
  }

  /** What made a number: { formula, terms: lists of factors [name, row, col], note }. */
  trace(name, row, col) {
    const { about } = this;
    switch (name) {
      case "q": return this.product(name, row, col, "xq", "Wq", "bq");
      case "k": return this.product(name, row, col, "xk", "Wk", "bk");
      case "v": return this.product(name, row, col, "xk", "Wv", "bv");
      case "scores": {
        const size = this.shape("q")[1];
        return { formula: "s = q · k", terms: Array.from({ length: size }, (_, i) => [["q", row, i], ["k", col, i]]) };
      }
      case "scaled":
        return { formula: about.scaling === 1 ? "s′ = s, this model does not divide" : `s′ = s / √d_k = s × ${show(about.scaling, 6)}`, terms: [[["scores", row, col]]], factor: about.scaling };
      case "weights": return this.traceWeight(row, col);
      case "z": {
        const asked = this.shape("v")[0];
        return { formula: "z = Σ a v", terms: Array.from({ length: asked }, (_, s) => [["weights", row, s], ["v", s, col]]) };
      }
      case "heads": {
        const size = this.shape("z")[1];
        const head = Math.floor(col / size);
        if (head === about.head) return { formula: `h = the z of head ${head + 1}, at its place`, terms: [[["z", row, col % size]]] };
        return { formula: `z of head ${head + 1}`, terms: [], note: "Made in the same way by another head, which has its own W." };
      }
      case "out": return this.product(name, row, col, "heads", "Wo", "bo");
      case "xq":
        if (this.has("token")) return { formula: "x = e + p", terms: [[["token", row, col]], [["position", row, col]]] };
        return { formula: "x", terms: [], note: about.incoming };
      case "xk": return { formula: "X", terms: [], note: about.incomingAsked };
      case "token": return { formula: "e = embedding of the token, times its scale", terms: [], note: "Learned: a row of the embedding table." };
      case "position": return { formula: "p = position", terms: [], note: "The vector of this place in the sentence." };
      case "bias": return { formula: "r", terms: [], note: "Learned: this model adds a number for the distance between the two words." };
      default: return { formula: NICE[name] ?? name, terms: [], note: about.editable ? "Yours to change." : "Learned: a weight of the model." };
    }
  }

  traceWeight(row, col) {
    const asked = this.shape("scaled")[1];
    if (this.has("visible") && this.get("visible", row, col) === 0) {
      return { formula: "a = 0", terms: [], note: "Masked: a word cannot attend to what is written after it." };
    }
    const seen = Array.from({ length: asked }, (_, s) => s).filter((s) => !this.has("visible") || this.get("visible", row, s) !== 0);
    const bias = this.has("bias");
    return {
      formula: bias ? "a = exp(s′ + r) / Σ exp(s′ + r)" : "a = exp(s′) / Σ exp(s′)",
      softmax: true,
      above: bias ? [["scaled", row, col], ["bias", row, col]] : [["scaled", row, col]],
      below: seen.map((s) => (bias ? [["scaled", row, s], ["bias", row, s]] : [["scaled", row, s]])),
      terms: [],
    };
  }

  /** The number once more, from what made it. */
  again(name, row, col) {
    const made = this.trace(name, row, col);
    const value = (factors) => factors.reduce((sum, at) => sum + this.get(...at), 0);
    if (made.softmax) {
      const top = Math.max(...made.below.map(value));
      const below = made.below.reduce((sum, factors) => sum + Math.exp(value(factors) - top), 0);
      return Math.exp(value(made.above) - top) / below;
    }
    if (!made.terms.length) return this.get(name, row, col);
    const sum = made.terms.reduce((total, factors) => total + factors.reduce((product, at) => product * this.get(...at), 1), 0);
    return sum * (made.factor ?? 1);
  }

  /** The largest difference between a number and the same made again from its parts. */
  largestDifference() {
    let largest = 0;
    for (const name of ["q", "k", "v", "scores", "scaled", "weights", "z", "out"]) {
      const [rows, cols] = this.shape(name);
      for (let row = 0; row < rows; row++) {
        for (let col = 0; col < cols; col++) largest = Math.max(largest, Math.abs(this.again(name, row, col) - this.get(name, row, col)));
      }
    }
    return largest;
  }
}

/** A number with so many decimals, a true minus, and no minus zero. */
function show(value, decimals = 2) {
  const text = value.toFixed(decimals);
  return (Number(text) === 0 ? text.replace("-", "") : text).replace("-", "−");
}

/** The arrays of the page's explanation as an engine. */
function modelEngine(outline, floats) {
  const arrays = {};
  for (const [name, { offset, shape }] of Object.entries(outline.places)) {
    const size = shape.reduce((product, length) => product * length, 1);
    arrays[name] = { shape, values: floats.subarray(offset, offset + size) };
  }
  const layer = outline.layer;
  const from = layer === 0 ? "The embedding of the token and its position." : `What layer ${layer} gave for this word.`;
  return new Engine(arrays, {
    ...outline,
    incoming: outline.kind === "cross" ? "What the decoder's own attention, below in the same layer, gave for this word." : from,
    incomingAsked: outline.kind === "cross" ? "The encoder's output for this source word." : from.replace("this word", "that word"),
  });
}

/** One head over given vectors and matrices: the whole of attention, computed here. */
function attendInPage({ X, Wq, Wk, Wv, Wo }) {
  const times = (a, b) => a.map((row) => b[0].map((_, j) => row.reduce((sum, value, i) => sum + value * b[i][j], 0)));
  const [q, k, v] = [times(X, Wq), times(X, Wk), times(X, Wv)];
  const scaling = 1 / Math.sqrt(k[0].length);
  const scores = q.map((one) => k.map((other) => one.reduce((sum, value, i) => sum + value * other[i], 0)));
  const scaled = scores.map((row) => row.map((value) => value * scaling));
  const weights = scaled.map((row) => {
    const top = Math.max(...row);
    const powers = row.map((value) => Math.exp(value - top));
    const sum = powers.reduce((a, b) => a + b, 0);
    return powers.map((value) => value / sum);
  });
  const z = times(weights, v);
  const matrices = { xq: X, xk: X, Wq, Wk, Wv, Wo, q, k, v, scores, scaled, weights, z, heads: z, out: times(z, Wo) };
  const arrays = {};
  for (const [name, rows] of Object.entries(matrices)) arrays[name] = { shape: [rows.length, rows[0].length], values: rows.flat() };
  return new Engine(arrays, { head: 0, heads: 1, scaling, editable: true, asked: ["a1", "a2"], reads: "a", incoming: "Yours to change.", incomingAsked: "Yours to change." });
}
