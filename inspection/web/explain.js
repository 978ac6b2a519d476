// Step by step: the model's numbers and the worked example side by side, every number a button that tells how it was made.

const WIDE = 5;
const TALL = 4;
const TERMS = 8;
let explanation = null;

/** The dimensions of each array: what its rows and columns count. Windows are kept a dimension, so that arrays page together. */
const DIMENSIONS = {
  xq: ["asking", "model"], token: ["asking", "model"], position: ["asking", "model"], xk: ["asked", "model"],
  Wq: ["model", "k"], Wk: ["model", "k"], Wv: ["model", "v"], q: ["asking", "k"], k: ["asked", "k"], v: ["asked", "v"],
  scores: ["asking", "asked"], scaled: ["asking", "asked"], weights: ["asking", "asked"], bias: ["asking", "asked"],
  z: ["asking", "v"], heads: ["asking", "joined"], Wo: ["joined", "out"], out: ["asking", "out"],
};
const mathName = (name) => NICE[name] ?? name;

/** A formula: letters upright or slanted, ^ and _ as raised and lowered. */
function typeset(text) {
  const box = element("span", { class: "math" });
  for (const part of text.split(/([A-Za-z′]+[\^_][A-Za-z0-9]+|√[a-z]_[a-z])/)) {
    const found = /^(√?[A-Za-z′]+)([\^_])(\w+)$/.exec(part);
    if (found) box.append(found[1], element(found[2] === "^" ? "sup" : "sub", { text: found[3] }));
    else if (part) box.append(part);
  }
  return box;
}

const STEPS = [
  {
    title: "The vectors that come in", formula: (engine) => (engine.has("token") ? "x = e + p" : "x"),
    text: "A word is a vector: in the first layer its embedding plus its position, later what the layer before gave.",
    mine: (engine) => (engine.has("token") ? ["token", "position", "xq", "xk"] : ["xq", "xk"]), toy: ["xq"],
  },
  {
    title: "Queries, keys and values", formula: () => "q = x W^Q,  k = x W^K,  v = x W^V",
    text: "Three learned matrices turn each vector into a question, a label to be found by, and a content.",
    mine: () => ["Wq", "q", "Wk", "k", "Wv", "v"], toy: ["Wq", "Wk", "Wv", "q", "k", "v"],
  },
  {
    title: "Dot products", formula: () => "s = q · k",
    text: "The question meets every label. The more they point the same way, the larger the score.",
    mine: () => ["scores"], toy: ["scores"],
  },
  {
    title: "Divide by √d_k", formula: (engine) => (engine.about.scaling === 1 ? "s′ = s" : "s′ = s / √d_k"),
    text: "Sums over more numbers grow larger; dividing keeps the softmax from becoming all or nothing.",
    mine: () => ["scaled"], toy: ["scaled"],
  },
  {
    title: "Mask and softmax", formula: (engine) => (engine.has("bias") ? "a = softmax(s′ + r)" : "a = softmax(s′)"),
    text: "What must not be seen is left out, and the scores become weights that add up to 1. These are the lines in the picture.",
    mine: (engine) => (engine.has("bias") ? ["bias", "weights"] : ["weights"]), toy: ["weights"],
  },
  {
    title: "Weighted sum", formula: () => "z = Σ a v",
    text: "The contents, each by its weight, added up: this head's answer.",
    mine: () => ["z"], toy: ["z"],
  },
  {
    title: "Heads joined and projected", formula: () => "o = Concat(z_1, …, z_h) W^O",
    text: "The answers of all heads stand side by side, and one more matrix mixes them into the vector that goes on.",
    mine: () => ["heads", "Wo", "out"], toy: ["Wo", "out"],
  },
];

/** A button for one number. */
function numberButton(engine, name, row, col, first) {
  const value = engine.get(name, row, col);
  const top = engine.tops[name] ??= engine.arrays[name].values.reduce((most, one) => Math.max(most, Math.abs(one)), 0);
  const strength = top ? (Math.abs(value) / top) ** 0.8 * 0.42 : 0;
  const hidden = engine.has("visible") && name === "weights" && engine.get("visible", row, col) === 0;
  const text = hidden ? "–" : show(value);
  return element("button", {
    type: "button", class: "n", tabindex: first ? 0 : -1, "data-name": name, "data-row": row, "data-col": col, "data-value": value,
    style: `background-color:rgba(var(${value < 0 ? "--orange-rgb" : "--blue-rgb"}),${strength.toFixed(3)})`,
    title: show(value, 6), "aria-label": `${text}, ${name} ${row + 1}, ${col + 1}`, text,
  });
}

function rowLabels(engine, name) {
  const [kind] = DIMENSIONS[name];
  const { about } = engine;
  if (kind === "asked") return about.asked;
  if (kind === "asking") return about.editable ? about.asked : [about.reads];
  return null;
}

/** The part of an array that is shown: all rows of words, a window of everything else. */
function windowOf(engine, name) {
  const [rows, cols] = engine.shape(name);
  const [rowKind, colKind] = DIMENSIONS[name];
  const at = (kind, count, span) => {
    const start = Math.max(0, Math.min(engine.windows[kind] ?? 0, count - span));
    return { start, end: Math.min(count, start + span) };
  };
  const words = rowKind === "asked" || rowKind === "asking";
  return { row: words ? { start: 0, end: rows } : at(rowKind, rows, TALL), col: at(colKind, cols, WIDE), rows, cols, colKind, rowKind };
}

/** A matrix of numbers with its name, its size, and arrows where it is larger than its window. */
function drawGrid(engine, name) {
  const [rows, cols] = engine.shape(name);
  const caption = element("div", { class: "grid-name" }, typeset(mathName(name)), element("span", { class: "size", text: `${rows} × ${cols}` }));
  if (DIMENSIONS[name][1] === "asked" && !engine.about.editable) return element("div", { class: "grid" }, caption, drawChips(engine, name));
  const view = windowOf(engine, name);
  const labels = rowLabels(engine, name);
  const table = element("table", {});
  for (let r = view.row.start; r < view.row.end; r++) {
    const line = element("tr", {});
    if (labels) line.append(element("th", { scope: "row" }, element("bdi", { text: labels[r] })));
    for (let c = view.col.start; c < view.col.end; c++) {
      line.append(element("td", {}, numberButton(engine, name, r, c, r === view.row.start && c === view.col.start)));
    }
    table.append(line);
  }
  const box = element("div", { class: "grid" }, caption, element("div", { class: "grid-scroll" }, table));
  if (view.cols > WIDE) caption.append(pager(engine, view.colKind, view.col, view.cols, WIDE, "column"));
  if (view.row.end - view.row.start < view.rows) caption.append(pager(engine, view.rowKind, view.row, view.rows, TALL, "row"));
  return box;
}

/** Scores and weights: a number under each asked word, wrapping as text does. */
function drawChips(engine, name) {
  const chips = engine.about.asked.map((word, col) => element("span", { class: "chip" },
    element("bdi", { text: word }), numberButton(engine, name, 0, col, col === 0)));
  return element("div", { class: "chips" }, ...chips);
}

function pager(engine, kind, view, count, span, word) {
  const step = (by) => () => {
    engine.windows[kind] = Math.max(0, Math.min(count - span, view.start + by));
    engine.draw();
  };
  const arrow = (text, label, by, off) => {
    const button = element("button", { type: "button", class: "arrow", text, "aria-label": label, on: { click: step(by) } });
    button.disabled = off;
    return button;
  };
  return element("span", { class: "pager" },
    arrow("‹", `Earlier ${word}s`, -span, view.start === 0),
    element("span", { text: `${word === "row" ? "↓ " : ""}${view.start + 1}–${view.end}` }),
    arrow("›", `Later ${word}s`, span, view.end >= count));
}

/** The last number that was asked about, and how one came to it. */
const traced = { engine: null, path: [] };

function traceNumber(engine, name, row, col) {
  if (traced.engine !== engine) traced.path = [];
  traced.engine = engine;
  traced.path.push([name, row, col]);
  reveal(engine, name, row, col);
  drawTrace();
}

/** Move the windows so that a number can be seen. */
function reveal(engine, name, row, col) {
  const view = DIMENSIONS[name] && windowOf(engine, name);
  if (!view) return;
  const into = (kind, at, span, range) => {
    if (at < range.start || at >= range.end) engine.windows[kind] = Math.max(0, at - Math.floor(span / 2));
  };
  into(view.colKind, col, WIDE, view.col);
  into(view.rowKind, row, TALL, view.row);
  engine.draw();
}

function drawTrace() {
  const { engine, path } = traced;
  const panel = byId("trace");
  for (const node of document.querySelectorAll(".n.is, .n.from")) node.classList.remove("is", "from");
  if (!path.length) return panel.replaceChildren(element("p", { class: "hint", text: "Choose any number to see what made it." }));
  const [name, row, col] = path[path.length - 1];
  const made = engine.trace(name, row, col);
  const title = element("p", { class: "trace-title" }, label(engine, name, row, col), " = ", element("output", { text: show(engine.get(name, row, col), 6) }),
    element("span", { class: "trace-formula" }, typeset(made.formula)));
  const back = element("button", { type: "button", class: "plain", text: "Back", on: { click: () => { path.pop(); drawTrace(); } } });
  const close = element("button", { type: "button", class: "plain", text: "Close", on: { click: () => { traced.path = []; drawTrace(); } } });
  back.disabled = path.length < 2;
  const body = made.softmax ? softmaxLines(engine, made) : termLines(engine, made);
  if (made.note) body.push(element("p", { class: "hint", text: made.note }));
  panel.replaceChildren(element("div", { class: "trace-head" }, title, back, close), element("div", { class: "trace-body" }, ...body));
  mark(engine, [[name, row, col]], "is");
  mark(engine, made.softmax ? [...made.above, ...made.below.flat()] : made.terms.flat(), "from");
  return undefined;
}

function mark(engine, places, look) {
  const wanted = new Set(places.map((place) => place.join()));
  for (const button of engine.box.querySelectorAll(".n")) {
    if (wanted.has([button.dataset.name, button.dataset.row, button.dataset.col].join())) button.classList.add(look);
  }
}

/** The name of a number: q with its index, s with its word. */
function label(engine, name, row, col) {
  const kinds = DIMENSIONS[name] ?? [null, null];
  const box = element("span", { class: "math" }, ...typeset(mathName(name)).childNodes);
  const word = kinds[0] === "asked" ? engine.about.asked[row] : kinds[1] === "asked" ? engine.about.asked[col] : null;
  if (word !== null) box.append("(", element("bdi", { class: "word", text: word }), ")");
  if (kinds[1] !== "asked") box.append(element("sub", { text: kinds[0] === "asking" || kinds[0] === "asked" || kinds[0] === null ? String(col + 1) : `${row + 1},${col + 1}` }));
  return box;
}

function factorButton(engine, [name, row, col]) {
  return element("button", { type: "button", class: "factor", on: { click: () => traceNumber(engine, name, row, col) } },
    label(engine, name, row, col), " ", element("span", { class: "value", text: show(engine.get(name, row, col), 4) }));
}

function termLines(engine, made) {
  if (!made.terms.length) return [];
  const terms = made.terms.map((factors) => ({ factors, value: factors.reduce((product, at) => product * engine.get(...at), 1) * (made.factor ?? 1) }));
  const order = [...terms].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const listed = terms.length <= TERMS + 1 ? terms : order.slice(0, TERMS);
  const rest = terms.length - listed.length;
  const lines = listed.map(({ factors, value }) => element("li", {},
    ...factors.flatMap((at, i) => [i ? " × " : "", factorButton(engine, at)]),
    made.factor !== undefined && made.factor !== 1 ? ` × ${show(made.factor, 4)}` : "", element("span", { class: "sum", text: `= ${show(value, 4)}` })));
  if (rest) {
    const sum = terms.reduce((total, term) => total + term.value, 0) - listed.reduce((total, term) => total + term.value, 0);
    lines.push(element("li", {}, `${rest} smaller terms together`, element("span", { class: "sum", text: `= ${show(sum, 4)}` })));
  }
  const total = terms.reduce((sum, term) => sum + term.value, 0);
  return [element("ul", { class: "terms" }, ...lines), element("p", { class: "total", text: `Sum of all ${terms.length}: ${show(total, 6)}` })];
}

function softmaxLines(engine, made) {
  const value = (factors) => factors.reduce((sum, at) => sum + engine.get(...at), 0);
  const part = (factors) => [`exp(`, ...factors.flatMap((at, i) => [i ? " + " : "", factorButton(engine, at)]), `)`];
  const below = made.below.map((factors) => Math.exp(value(factors)));
  const lines = made.below.map((factors, i) => ({ factors, size: below[i] })).sort((a, b) => b.size - a.size);
  const rest = lines.slice(TERMS);
  const items = lines.slice(0, TERMS).map(({ factors, size }) => element("li", {}, ...part(factors), element("span", { class: "sum", text: `= ${show(size, 4)}` })));
  if (rest.length) items.push(element("li", {}, `${rest.length} smaller terms together`, element("span", { class: "sum", text: `= ${show(rest.reduce((sum, one) => sum + one.size, 0), 4)}` })));
  const sum = below.reduce((a, b) => a + b, 0);
  return [
    element("p", {}, "Above: ", ...part(made.above), ` = ${show(Math.exp(value(made.above)), 4)}. Below, the sum of:`),
    element("ul", { class: "terms" }, ...items),
    element("p", { class: "total", text: `${show(Math.exp(value(made.above)), 4)} / ${show(sum, 4)} = ${show(Math.exp(value(made.above)) / sum, 6)}` }),
  ];
}

/** Arrow keys walk over the numbers of a matrix; each matrix is one stop of the Tab key. */
function gridKeys(event) {
  const from = event.target.closest?.(".n");
  if (!from || !event.key.startsWith("Arrow")) return;
  const all = [...from.closest(".grid").querySelectorAll(".n")];
  const wide = from.closest("tr")?.children.length ? from.closest("tr").querySelectorAll(".n").length : 1;
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: wide, ArrowUp: -wide }[event.key];
  const to = all[all.indexOf(from) + by];
  if (!to) return;
  event.preventDefault();
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function listenToNumbers(engine, box) {
  box.addEventListener("click", (event) => {
    const button = event.target.closest(".n");
    if (button) traceNumber(box.engine, button.dataset.name, Number(button.dataset.row), Number(button.dataset.col));
  });
  box.addEventListener("keydown", gridKeys);
  box.engine = engine;
}
