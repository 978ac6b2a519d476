// What the picture says, in words: the strongest links, the running text, and the table.

const percent = (weight) => `${(100 * weight).toFixed(weight < 0.0995 ? 1 : 0)} %`;
const LISTED = 8;

function leadFor(active, rowUnits, colUnits, weight) {
  const row = rowUnits[active.side === "row" ? active.index : active.row];
  const col = colUnits[active.side === "col" ? active.index : active.col];
  const quoted = (unit) => element("bdi", { class: "unit on", text: unit.text.trim() || unit.text });
  const asks = state.kind === "encoder" ? ["", " attends to"] : ["Writing ", ", the model attends to"];
  if (active.side === "row") return [asks[0], quoted(row), asks[1]];
  if (active.side === "cell") return [asks[0], quoted(row), asks[1] + " ", quoted(col), ` with ${percent(weight)}`];
  return [quoted(col), " is attended to by"];
}

/** The list beside the picture: the strongest answers of the lit word, or the strongest links of the whole head. */
function drawReadout(matrix, active) {
  const { rows, cols } = sides(state.kind);
  const [rowUnits, colUnits] = [unitsOf(rows, state.unit), unitsOf(cols, state.unit)];
  let links = active ? linksOf(matrix, active) : strongest(matrix, LISTED);
  const total = links.reduce((sum, link) => sum + link.weight, 0);
  const lead = active ? leadFor(active, rowUnits, colUnits, links[0].weight) : ["Point at a word, or move to it with the keyboard. The strongest links of this head:"];
  byId("readout-lead").replaceChildren(...lead);
  links = links.sort((a, b) => b.weight - a.weight).slice(0, LISTED).filter((link) => link.weight > 0.0005 && active?.side !== "cell");
  byId("readout-list").replaceChildren(...links.map(({ r, c, weight }) => {
    const name = !active ? `${rowUnits[r].text.trim()} → ${colUnits[c].text.trim()}` : (active.side === "row" ? colUnits[c] : rowUnits[r]).text.trim();
    const bar = element("span", { class: "bar" }, element("i", { style: `width:${(100 * Math.min(1, weight)).toFixed(1)}%` }));
    return element("li", {}, element("bdi", { text: name, title: name }), bar, element("span", { class: "value", text: percent(weight) }));
  }));
  const listed = links.reduce((sum, link) => sum + link.weight, 0);
  const rest = active?.side === "row" && total - listed > 0.0005 ? `All others together: ${percent(total - listed)}.` : "";
  const strips = active && active.side !== "cell" && state.head < 0 ? " Beside each answer, a cell is a head, from 1 on." : "";
  byId("readout-rest").textContent = rest + strips;
}

function strongest(matrix, count) {
  const found = [];
  for (let i = 0; i < matrix.values.length; i++) {
    const weight = matrix.values[i];
    if (found.length < count || weight > found[found.length - 1].weight) {
      found.push({ r: Math.floor(i / matrix.cols), c: i % matrix.cols, weight });
      found.sort((a, b) => b.weight - a.weight);
      if (found.length > count) found.pop();
    }
  }
  return found;
}

/** The running text, once: spans that are tinted later. */
const running = { source: [], target: [] };

function drawSentences() {
  const write = (id, list) => {
    const spans = [];
    const nodes = [];
    const units = unitsOf(list, state.unit);
    units.forEach((unit, index) => {
      spans[index] = unit.special ? null : element("span", { class: "unit", text: unit.text.trim() });
      if (!spans[index]) return;
      if (nodes.length && (state.unit === "word" || unit.space)) nodes.push(" ");
      nodes.push(spans[index]);
    });
    byId(id).replaceChildren(...nodes);
    return spans;
  };
  running.source = write("source-text", data.source);
  running.target = write("target-text", data.written);
}

function light(span) {
  if (!span) return;
  span.on = true;
  span.classList.add("on");
}

function drawRunning(matrix, active) {
  const paint = (spans, side, shift) => spans.forEach((span, index) => {
    if (!span) return;
    const at = index + shift;
    const live = active && side;
    const own = side === "row" ? (active?.side === "row" ? active.index : active?.row) : active?.side === "col" ? active.index : active?.col;
    const weight = !live ? 0 : side === "col" && active.side === "row" ? matrix.values[active.index * matrix.cols + at]
      : side === "row" && active.side === "col" ? matrix.values[at * matrix.cols + active.index] : 0;
    look(span, weight, Boolean(live) && own === at);
  });
  const isRow = active?.side === "row";
  if (state.kind === "cross") {
    paint(running.source, "col", 0);
    paint(running.target, "row", 0);
  } else if (state.kind === "encoder") {
    paint(running.source, isRow ? "col" : "row", 0);
    if (active && active.side !== "cell") light(running.source[active.index]);
    paint(running.target, null, 0);
  } else {
    // What has been read is what was written a step before: the column of a word is one to the right of its row.
    paint(running.target, isRow ? "col" : "row", isRow ? 1 : 0);
    if (active?.side === "row") light(running.target[active.index]);
    if (active?.side === "col") light(running.target[active.index - 1]);
    paint(running.source, null, 0);
  }
}

/** The whole head as a table: built when it is opened, and only then. */
function drawTable(matrix) {
  if (!byId("table-details").open) return;
  const { rows, cols } = sides(state.kind);
  const [rowUnits, colUnits] = [unitsOf(rows, state.unit), unitsOf(cols, state.unit)];
  const head = element("tr", {}, element("td"), ...colUnits.map((unit) => element("th", { scope: "col" }, element("bdi", { text: unit.text.trim() }))));
  const body = rowUnits.map((unit, r) => element("tr", {}, element("th", { scope: "row" }, element("bdi", { text: unit.text.trim() })),
    ...colUnits.map((_, c) => element("td", { text: (100 * matrix.values[r * matrix.cols + c]).toFixed(1) }))));
  const caption = element("caption", { class: "hidden", text: `${KINDS[state.kind]} attention, layer ${state.layer + 1}, ${headName()}, in percent` });
  byId("table-frame").replaceChildren(element("table", {}, caption, element("thead", {}, head), element("tbody", {}, ...body)));
}
