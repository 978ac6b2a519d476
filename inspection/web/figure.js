// The picture: two columns of words, and lines from those that ask to those that are asked.

const figure = { rows: [], cols: [], focus: { row: 0, col: 0 } };

/** A word as it is shown, apart from the text around it whatever its direction. */
function wordButton(side, unit, index) {
  const button = element("button", {
    type: "button", class: "token" + (unit.special ? " special" : ""), "data-side": side, "data-index": index,
    tabindex: index === 0 ? 0 : -1, "aria-pressed": "false", title: unit.note ?? undefined,
  }, element("bdi", { text: unit.text }));
  return button;
}

function drawColumns() {
  const { rows, cols } = sides(state.kind);
  const shown = { row: unitsOf(rows, state.unit), col: unitsOf(cols, state.unit) };
  for (const side of ["row", "col"]) {
    const box = byId(side + "s");
    figure[side + "s"] = shown[side].map((unit, index) => wordButton(side, unit, index));
    figure.focus[side] = 0;
    box.replaceChildren(...figure[side + "s"]);
  }
  byId("figure").classList.toggle("dense", Math.max(shown.row.length, shown.col.length) > 48);
}

function headName() {
  return state.head < 0 ? "mean of all heads" : `head ${state.head + 1}`;
}

function drawTitles() {
  const titles = {
    encoder: ["Source words attend to source words", "asks", "is asked"],
    decoder: ["Output words attend to what is written already", "being written", "written already"],
    cross: ["Output words attend to source words", "being written", "source"],
  }[state.kind];
  byId("figure-title").textContent = titles[0];
  byId("figure-hint").textContent = `Layer ${state.layer + 1}, ${headName()}`;
  byId("rows-title").textContent = titles[1];
  byId("cols-title").textContent = titles[2];
  byId("help-rows").textContent = state.kind === "encoder" ? ""
    : "In the decoder, a word on the left is the word that the model is about to write at this step; it has read the words before it, from <s> on.";
}

/** Fit a canvas to its box and the screen's resolution. */
function fitCanvas(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

function drawLines(matrix, active) {
  const box = byId("lines").parentElement;
  const [width, height] = [box.clientWidth, box.clientHeight];
  const context = fitCanvas(byId("lines"), width, height);
  const row = figure.rows[0]?.offsetHeight ?? 28;
  const strips = stripWidth(active);
  const left = strips.side === "row" ? strips.width : 0;
  const right = width - (strips.side === "col" ? strips.width : 0);
  const bend = (right - left) * 0.42;
  const line = (r, c, strength, colour) => {
    const [y1, y2] = [(r + 0.5) * row, (c + 0.5) * row];
    context.strokeStyle = `rgba(${palette[colour]}, ${strength.alpha})`;
    context.lineWidth = strength.width;
    context.beginPath();
    context.moveTo(left, y1);
    context.bezierCurveTo(left + bend, y1, right - bend, y2, right, y2);
    context.stroke();
  };
  context.lineCap = "round";
  const faint = active ? 0.16 : 1;
  const threshold = Math.max(0.06, matrix.rows * matrix.cols > 4000 ? 0.16 : 0);
  if (!active || matrix.rows * matrix.cols <= 4000) {
    for (let r = 0; r < matrix.rows; r++) for (let c = 0; c < matrix.cols; c++) {
      const weight = matrix.values[r * matrix.cols + c];
      if (weight > threshold) line(r, c, { alpha: (0.06 + 0.64 * weight ** 1.3) * faint, width: 0.7 + 2.6 * weight }, "blue-rgb");
    }
  }
  if (active) {
    for (const { r, c, weight } of linksOf(matrix, active)) {
      if (weight > 0.004) line(r, c, { alpha: 0.1 + 0.9 * weight ** 0.75, width: 0.8 + 5.2 * weight }, "blue-rgb");
    }
    drawStrips(context, active, strips, row, width);
  }
}

/** The links of what is lit: a row, a column, or one pair. */
function linksOf(matrix, active) {
  const at = (r, c) => ({ r, c, weight: matrix.values[r * matrix.cols + c] });
  if (active.side === "cell") return [at(active.row, active.col)];
  return active.side === "row"
    ? Array.from({ length: matrix.cols }, (_, c) => at(active.index, c))
    : Array.from({ length: matrix.rows }, (_, r) => at(r, active.index));
}

/** With the mean of all heads, a strip of cells beside each answer tells the heads apart: a cell is a head, in order. */
function stripWidth(active) {
  const { heads } = data.maps[state.kind];
  if (!active || state.head >= 0 || active.side === "cell" || heads < 2) return { side: null, width: 0 };
  const cell = heads > 8 ? 4 : 6;
  return { side: active.side === "row" ? "col" : "row", width: heads * cell + 6, cell, heads };
}

/** A weight as an opaque colour between the faint ground and blue, so that a cell is one stroke of the brush. */
function stripColour(weight) {
  const [ground, blue] = [palette.ground, palette.full];
  const share = weight ** 0.7;
  return `rgb(${ground.map((value, i) => Math.round(value + (blue[i] - value) * share))})`;
}

function drawStrips(context, active, strips, row, width) {
  if (!strips.side) return;
  for (let h = 0; h < strips.heads; h++) {
    const one = matrixOf(state.kind, state.layer, h, state.unit);
    const x = (strips.side === "col" ? width - strips.width + 5 : 1) + h * strips.cell;
    for (const { r, c, weight } of linksOf(one, active)) {
      const y = (strips.side === "col" ? c : r) * row + row * 0.2;
      context.fillStyle = weight > 0.01 ? stripColour(weight) : palette.faint;
      context.fillRect(x, y, strips.cell - 1, row * 0.6);
    }
  }
}

/** Change the look of a word only where it differs: a page of 200 words has hundreds. */
function look(node, weight, on) {
  const tint = weight > 0.004 ? `rgba(${palette["blue-rgb"]}, ${(0.06 + 0.44 * weight ** 0.7).toFixed(3)})` : "";
  if (node.tint !== tint) node.style.backgroundColor = node.tint = tint;
  if (node.on !== on) node.classList.toggle("on", (node.on = on));
}

/** Tint the words by weight and mark the chosen one. */
function drawWords(matrix, active) {
  const weights = { row: new Float32Array(matrix.rows), col: new Float32Array(matrix.cols) };
  if (active) {
    for (const { r, c, weight } of linksOf(matrix, active)) {
      if (active.side !== "col") weights.col[c] = weight;
      if (active.side !== "row") weights.row[r] = weight;
    }
  }
  const on = { row: active?.side === "row" ? active.index : active?.row, col: active?.side === "col" ? active.index : active?.col };
  for (const side of ["row", "col"]) {
    figure[side + "s"].forEach((button, index) => {
      look(button, weights[side][index], on[side] === index);
      const held = state.pin?.side === side && state.pin.index === index;
      if (button.held !== held) button.setAttribute("aria-pressed", String((button.held = held)));
    });
  }
}

/** Pointer, focus and keys on the two columns. */
function listenToFigure() {
  const columns = document.querySelector(".columns");
  const target = (event) => event.target.closest?.(".token");
  const light = (button) => choose({ hover: button ? { side: button.dataset.side, index: Number(button.dataset.index) } : null });
  columns.addEventListener("pointerover", (event) => event.pointerType !== "touch" && light(target(event)));
  columns.addEventListener("pointerleave", () => light(null));
  columns.addEventListener("focusin", (event) => target(event)?.matches(":focus-visible") && light(target(event)));
  columns.addEventListener("focusout", () => light(null));
  columns.addEventListener("click", (event) => {
    const button = target(event);
    if (!button) return choose({ pin: null });
    const held = { side: button.dataset.side, index: Number(button.dataset.index) };
    const same = state.pin?.side === held.side && state.pin.index === held.index;
    return choose({ pin: same ? null : held, hover: null });
  });
  columns.addEventListener("keydown", (event) => figureKey(event, target(event)));
}

function figureKey(event, button) {
  if (!button || event.ctrlKey || event.altKey || event.metaKey) return;
  const { layers, heads } = data.maps[state.kind];
  const side = button.dataset.side;
  const list = figure[side + "s"];
  const index = Number(button.dataset.index);
  const move = (to) => {
    list[figure.focus[side]].tabIndex = -1;
    figure.focus[side] = Math.max(0, Math.min(list.length - 1, to));
    list[figure.focus[side]].tabIndex = 0;
    list[figure.focus[side]].focus();
  };
  const keys = {
    ArrowDown: () => move(index + 1),
    ArrowUp: () => move(index - 1),
    Home: () => move(0),
    End: () => move(list.length - 1),
    ArrowRight: () => choose({ head: state.head + 1 >= heads ? -1 : state.head + 1 }),
    ArrowLeft: () => choose({ head: state.head < 0 ? heads - 1 : state.head - 1 }),
    PageDown: () => choose({ layer: Math.min(layers - 1, state.layer + 1) }),
    PageUp: () => choose({ layer: Math.max(0, state.layer - 1) }),
    Escape: () => choose({ pin: null, hover: null }),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}
