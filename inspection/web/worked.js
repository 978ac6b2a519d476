// Puts the steps together: the model on one side, and on the other two words whose numbers can be changed.

// a1 = (1, 1) and a2 = (1, 0) give q1 = (1, 2), q2 = (1, 1), k1 = (1, 0), k2 = (0, 1), and scores / √2 of 0.71 and 1.41.
const WORKED = {
  X: [[1, 1], [1, 0]],
  Wq: [[1, 1], [0, 1]],
  Wk: [[0, 1], [1, -1]],
  Wv: [[1, 0], [1, 2]],
  Wo: [[1, 0], [1, 1]],
};
const INPUT_OF = { xq: "X", Wq: "Wq", Wk: "Wk", Wv: "Wv", Wo: "Wo" };
const worked = { values: structuredClone(WORKED), engine: null };

/** A matrix of the worked example that can be changed. */
function drawInputs(name) {
  const key = INPUT_OF[name];
  const table = element("table", {});
  worked.values[key].forEach((row, r) => {
    const line = element("tr", {});
    if (name === "xq") line.append(element("th", { scope: "row", text: `a${r + 1}` }));
    row.forEach((value, c) => line.append(element("td", {}, element("input", {
      type: "number", step: "any", value, class: "n-input", "data-key": key, "data-row": r, "data-col": c,
      "aria-label": name === "xq" ? `a${r + 1}, number ${c + 1}` : `${mathName(name).replace("^", " ")}, row ${r + 1}, column ${c + 1}`,
      on: { input: (event) => change(key, r, c, event.target) },
    }))));
    table.append(line);
  });
  const rows = worked.values[key].length;
  return element("div", { class: "grid" },
    element("div", { class: "grid-name" }, typeset(name === "xq" ? "a" : mathName(name)), element("span", { class: "size", text: `${rows} × 2` })),
    element("div", { class: "grid-scroll" }, table));
}

function change(key, row, col, input) {
  const value = input.valueAsNumber;
  input.setAttribute("aria-invalid", String(!Number.isFinite(value)));
  if (!Number.isFinite(value)) return;
  worked.values[key][row][col] = value;
  compute();
}

function resetWorked() {
  worked.values = structuredClone(WORKED);
  for (const input of document.querySelectorAll(".n-input")) {
    input.value = worked.values[input.dataset.key][input.dataset.row][input.dataset.col];
    input.setAttribute("aria-invalid", "false");
  }
  compute();
}

/** Compute the example again and draw everything in it that is not an input. */
function compute() {
  const engine = prepare(attendInPage(worked.values), document.getElementById("steps"), () => {
    for (const slot of document.querySelectorAll(".toy .slot")) slot.replaceChildren(drawGrid(engine, slot.dataset.name));
  });
  engine.windows = {};
  worked.engine = engine;
  for (const box of document.querySelectorAll(".toy")) {
    box.engine = engine;
  }
  engine.box = { querySelectorAll: (what) => document.querySelectorAll(`.toy ${what}`) };
  engine.draw();
  if (traced.engine?.about.editable) {
    traced.engine = engine;
    drawTrace();
  }
}

function prepare(engine, box, draw) {
  engine.windows = {};
  engine.tops = {};
  engine.box = box;
  engine.draw = draw;
  return engine;
}

function stepSection(step, index, engine) {
  const toy = element("div", { class: "toy" }, ...step.toy.map((name) =>
    name in INPUT_OF ? drawInputs(name) : element("div", { class: "slot", "data-name": name })));
  const mine = element("div", { class: "mine" }, ...step.mine(engine).map((name) => element("div", { class: "slot", "data-name": name })));
  for (const box of [toy, mine]) listenToNumbers(box === mine ? engine : null, box);
  return element("section", { class: "step", "aria-label": step.title },
    element("div", { class: "step-head" },
      element("h3", {}, element("span", { class: "step-number", text: index ? String(index) : "·" }), typeset(step.title)),
      element("p", { class: "step-formula" }, typeset(step.formula(engine))),
      element("p", { class: "hint", text: step.text })),
    mine, toy);
}

async function startExplanation() {
  const outline = data.explanation;
  const bytes = await bytesOf("numbers");
  const engine = prepare(modelEngine(outline, new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength >> 2)), null, () => {
    for (const slot of document.querySelectorAll(".mine .slot")) slot.replaceChildren(drawGrid(engine, slot.dataset.name));
    if (traced.engine === engine) drawTrace();
  });
  engine.box = { querySelectorAll: (what) => document.querySelectorAll(`.mine ${what}`) };
  explanation = engine;
  byId("explain").hidden = false;
  drawLead(outline);
  const reset = element("button", { type: "button", class: "plain", text: "Reset", on: { click: resetWorked } });
  byId("steps").replaceChildren(
    element("div", { class: "step heads" },
      element("p", { class: "mine-head" }, "Your model, reading ", element("bdi", { class: "word", text: outline.reads })),
      element("p", { class: "toy-head" }, "Two words to play with: change a number", reset)),
    ...STEPS.map((step, index) => stepSection(step, index, engine)));
  engine.draw();
  compute();
  drawTrace();
  const difference = engine.largestDifference();
  byId("explain").dataset.difference = difference;
  byId("explain-check").textContent = `Every number is the model's own. Made again in this page from what it came from, none differs by more than ${difference.toExponential(0).replace("-", "−")}.`;
}

function drawLead(outline) {
  const where = { encoder: "encoder's", decoder: "decoder's own", cross: "decoder-to-source" }[outline.kind];
  const quoted = (text) => element("bdi", { class: "word", text });
  const rest = outline.writes === null ? [" looks at the sentence."] : [" has been read, and ", quoted(outline.writes), " is about to be written."];
  byId("explain-lead").replaceChildren(`Head ${outline.head + 1} of layer ${outline.layer + 1} of the ${where} attention, at the step where `, quoted(outline.reads), ...rest,
    " Choose a number to see what made it.");
}
