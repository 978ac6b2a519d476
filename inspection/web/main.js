// Start: decode, recall what was chosen, draw.

/** Everything that depends on the kind, the layer, the head or the units. */
function drawStructure() {
  const key = [state.kind, state.unit].join();
  if (figure.key !== key) {
    figure.key = key;
    drawColumns();
    drawSentences();
  }
  drawTitles();
  const matrix = matrixOf(state.kind, state.layer, state.head, state.unit);
  drawMatrix(matrix);
  drawOverview();
  drawTable(matrix);
}

/** Everything that depends on what the pointer or the keyboard is on. */
function drawLit() {
  const matrix = matrixOf(state.kind, state.layer, state.head, state.unit);
  const active = lit();
  drawLines(matrix, active);
  drawWords(matrix, active);
  drawCross(active);
  drawReadout(matrix, active);
  drawRunning(matrix, active);
}

async function start() {
  await loadWeights();
  byId("model-name").textContent = data.model;
  recall();
  readPalette();
  drawControls();
  drawStructure();
  drawLit();
  listenToFigure();
  listenToMatrix();
  byId("table-details").addEventListener("toggle", () => redraw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(state.theme));
  new ResizeObserver(() => redraw(true)).observe(document.querySelector("main"));
  if (data.explanation) await startExplanation();
  // For tests and the curious: what is shown, and the numbers behind it.
  window.metaphrase = { data, state, choose, matrixOf, explanation: data.explanation ? explanation : null };
  document.documentElement.dataset.ready = "true";
}

start();
