// The head as a matrix, and every head as a small one.

const grid = { left: 0, top: 0, cell: 0 };

/** Paint a matrix, one pixel a weight, into an image that is then scaled. */
function imageOf(matrix, top) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [matrix.cols, matrix.rows];
  const context = canvas.getContext("2d");
  const image = context.createImageData(matrix.cols, matrix.rows);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = 255 / (top || 1);
  for (let i = 0; i < pixels.length; i++) pixels[i] = palette.pixels[Math.min(255, Math.round(matrix.values[i] * scale))];
  context.putImageData(image, 0, 0);
  return canvas;
}

function shorten(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = Array.from(text);
  while (letters.length > 1 && context.measureText(letters.join("") + "…").width > room) letters.pop();
  return letters.join("") + "…";
}

function drawMatrix(matrix) {
  const { rows, cols } = sides(state.kind);
  const [rowUnits, colUnits] = [unitsOf(rows, state.unit), unitsOf(cols, state.unit)];
  const canvas = byId("matrix-base");
  const width = canvas.parentElement.clientWidth;
  const labelled = Math.max(matrix.rows, matrix.cols) <= 44;
  const fontSize = labelled ? 11.5 : 0;
  const measure = canvas.getContext("2d");
  measure.font = `${fontSize}px ${palette.sans}`;
  const widest = (units) => Math.min(84, Math.max(...units.map((unit) => measure.measureText(unit.text).width)));
  grid.left = labelled ? widest(rowUnits) + 8 : 1;
  grid.top = labelled ? widest(colUnits) * 0.87 + 12 : 1;
  const room = width - grid.left - (labelled ? 26 : 1);
  grid.cell = Math.min(24, room / matrix.cols);
  grid.width = grid.cell * matrix.cols;
  grid.height = grid.cell * matrix.rows;
  const height = grid.top + grid.height + 2;
  for (const id of ["matrix-base", "matrix-over"]) byId(id).style.height = `${height}px`;
  const context = fitCanvas(canvas, width, height);
  grid.pixels = { width, height };
  context.imageSmoothingEnabled = false;
  const top = topOf(matrix);
  context.drawImage(imageOf(matrix, top), grid.left, grid.top, grid.width, grid.height);
  context.strokeStyle = palette.line;
  context.strokeRect(grid.left - 0.5, grid.top - 0.5, grid.width + 1, grid.height + 1);
  if (labelled) drawLabels(context, rowUnits, colUnits, Math.min(fontSize, grid.cell * 0.95));
  byId("scale-top").textContent = top.toFixed(2);
  const bar = byId("scale").getContext("2d");
  [byId("scale").width, byId("scale").height] = [256, 1];
  palette.ramp.forEach((colour, i) => { bar.fillStyle = `rgb(${colour})`; bar.fillRect(i, 0, 1, 1); });
}

function drawLabels(context, rowUnits, colUnits, size) {
  context.font = `${Math.max(6.5, size)}px ${palette.sans}`;
  context.fillStyle = palette.ink;
  context.textBaseline = "middle";
  context.textAlign = "right";
  rowUnits.forEach((unit, r) => context.fillText(shorten(context, unit.text, 84), grid.left - 6, grid.top + (r + 0.5) * grid.cell));
  context.textAlign = "left";
  colUnits.forEach((unit, c) => {
    context.save();
    context.translate(grid.left + (c + 0.5) * grid.cell, grid.top - 6);
    context.rotate(-Math.PI / 3);
    context.fillText(shorten(context, unit.text, 84), 0, 0);
    context.restore();
  });
}

/** The lit row, column or cell, on a second canvas so that the matrix itself need not be painted again. */
function drawCross(active) {
  const context = fitCanvas(byId("matrix-over"), grid.pixels.width, grid.pixels.height);
  if (!active) return;
  const row = active.side === "row" ? active.index : active.row;
  const col = active.side === "col" ? active.index : active.col;
  // Around small cells the frame stands off, so that it does not cover them.
  const off = grid.cell < 8 ? 1.5 : 0;
  context.strokeStyle = palette.orange;
  context.lineWidth = grid.cell < 8 ? 1 : 2;
  const frame = (x, y, width, height) => context.strokeRect(x - off, y - off, width + 2 * off, height + 2 * off);
  if (row !== undefined) frame(grid.left - 1, grid.top + row * grid.cell, grid.width + 2, grid.cell);
  if (col !== undefined) frame(grid.left + col * grid.cell, grid.top - 1, grid.cell, grid.height + 2);
}

function listenToMatrix() {
  const canvas = byId("matrix-over");
  const cellAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const col = Math.floor((event.clientX - box.left - grid.left) / grid.cell);
    const row = Math.floor((event.clientY - box.top - grid.top) / grid.cell);
    const { rows, cols } = matrixOf(state.kind, state.layer, state.head, state.unit);
    return row >= 0 && col >= 0 && row < rows && col < cols ? { side: "cell", row, col } : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (cell?.row !== state.hover?.row || cell?.col !== state.hover?.col) choose({ hover: cell });
  });
  canvas.addEventListener("pointerleave", () => choose({ hover: null }));
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    choose({ pin: cell ? { side: "row", index: cell.row } : null, hover: null });
  });
}

/** A thumbnail a head: rows are layers, columns heads. Painted again only when the kind, the units or the colours change. */
function drawOverview() {
  const { layers, heads } = data.maps[state.kind];
  const box = byId("overview");
  const key = [state.kind, state.unit, palette.panel].join();
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.style.gridTemplateColumns = `2.6rem repeat(${heads}, minmax(26px, 112px))`;
    const nodes = [element("span")];
    for (let h = 0; h < heads; h++) nodes.push(element("span", { class: "name", text: String(h + 1) }));
    for (let layer = 0; layer < layers; layer++) {
      nodes.push(element("span", { class: "name", text: `L${layer + 1}` }));
      for (let head = 0; head < heads; head++) nodes.push(thumbnail(layer, head));
    }
    box.replaceChildren(...nodes);
    paintThumbnails([...box.querySelectorAll(".thumb")], key);
  }
  for (const button of box.querySelectorAll(".thumb")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head));
  }
}

function thumbnail(layer, head) {
  const name = `Layer ${layer + 1}, head ${head + 1}`;
  return element("button", {
    type: "button", class: "thumb", "data-layer": layer, "data-head": head, "aria-label": name, title: name,
    on: { click: () => choose({ layer, head }) },
  });
}

/** A few thumbnails a turn, so that long sentences neither delay the first paint nor hold up the pointer. */
function paintThumbnails(buttons, key) {
  const began = performance.now();
  while (buttons.length && performance.now() - began < 12) {
    const button = buttons.shift();
    const matrix = matrixOf(state.kind, Number(button.dataset.layer), Number(button.dataset.head), state.unit);
    const image = imageOf(matrix, topOf(matrix));
    image.setAttribute("aria-hidden", "true");
    button.replaceChildren(image);
  }
  if (buttons.length) setTimeout(() => byId("overview").dataset.key === key && paintThumbnails(buttons, key), 8);
}
