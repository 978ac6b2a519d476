// What is chosen, and the controls that choose it. Every change ends in one redraw in the next frame.

const KINDS = { encoder: "Encoder", decoder: "Decoder", cross: "Cross" };
const state = { kind: "cross", layer: 0, head: -1, unit: "word", theme: "auto", hover: null, pin: null };
const byId = (id) => document.getElementById(id);

/** A new element with properties and children; text is always set as text. */
function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "text") node.textContent = value;
    else if (key === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const pending = { structure: false, frame: 0 };

/** Ask for a redraw; structure = the tokens, the matrix or the thumbnails change too, not only what is lit. */
function redraw(structure = false) {
  pending.structure ||= structure;
  if (pending.frame) return;
  pending.frame = requestAnimationFrame(() => {
    pending.frame = 0;
    const whole = pending.structure;
    pending.structure = false;
    if (whole) drawStructure();
    drawLit();
  });
}

/** Choose something; what no longer exists after it (a layer, a held word) is let go. */
function choose(change) {
  const before = { kind: state.kind, unit: state.unit };
  Object.assign(state, change);
  const { layers, heads } = data.maps[state.kind];
  state.layer = Math.min(state.layer, layers - 1);
  state.head = Math.min(state.head, heads - 1);
  if (before.kind !== state.kind || before.unit !== state.unit) state.pin = state.hover = null;
  const structure = Object.keys(change).some((key) => key !== "hover" && key !== "pin");
  if (structure) drawControls();
  if (structure || "pin" in change) remember();
  redraw(structure);
}

/** The word or pair that is lit: what the pointer or the focus is on, else what is held. */
function lit() {
  return state.hover ?? state.pin;
}

/** Keep the choice in the address, so that a link or a reload shows the same. */
function remember() {
  const parts = [`view=${state.kind}`, `layer=${state.layer + 1}`, `head=${state.head < 0 ? "all" : state.head + 1}`, `units=${state.unit}`];
  if (state.pin) parts.push(`${state.pin.side}=${state.pin.index}`);
  try {
    history.replaceState(null, "", "#" + parts.join("&"));
  } catch {
    // A frame without an address of its own, as in a notebook: nothing to keep.
  }
}

function recall() {
  Object.assign(state, data.start);
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (data.maps[wanted.get("view")]) state.kind = wanted.get("view");
  const { layers, heads } = data.maps[state.kind];
  const within = (text, top, otherwise) => {
    const value = Number.parseInt(text, 10);
    return value >= 1 && value <= top ? value - 1 : otherwise;
  };
  state.layer = within(wanted.get("layer"), layers, Math.min(state.layer, layers - 1));
  state.head = wanted.get("head") === "all" ? -1 : within(wanted.get("head"), heads, Math.min(state.head, heads - 1));
  if (["word", "token"].includes(wanted.get("units"))) state.unit = wanted.get("units");
  for (const side of ["row", "col"]) {
    const list = sides(state.kind)[side + "s"];
    const index = within(String(Number(wanted.get(side) ?? -2) + 1), unitsOf(list, state.unit).length, null);
    if (wanted.has(side) && index !== null) state.pin = { side, index };
  }
}

/** One group of radio buttons drawn as a bar. */
function drawPicker(id, options, chosen, take) {
  const box = byId(id);
  const key = JSON.stringify(options);
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.replaceChildren(...options.map(([value, label, spoken]) =>
      element("label", {},
        element("input", { type: "radio", name: id, value, "aria-label": spoken, on: { change: () => take(value) } }),
        element("span", { text: label }))));
  }
  for (const input of box.querySelectorAll("input")) input.checked = input.value === String(chosen);
}

function drawControls() {
  const { layers, heads } = data.maps[state.kind];
  const numbers = (count, word) => Array.from({ length: count }, (_, i) => [i, String(i + 1), `${word} ${i + 1}`]);
  drawPicker("pick-kind", Object.entries(KINDS).filter(([kind]) => data.maps[kind]), state.kind, (kind) => choose({ kind }));
  drawPicker("pick-layer", numbers(layers, "Layer"), state.layer, (layer) => choose({ layer }));
  drawPicker("pick-head", [[-1, "Mean", "Mean of all heads"], ...numbers(heads, "Head")], state.head, (head) => choose({ head }));
  drawPicker("pick-unit", [["word", "Words"], ["token", "Pieces"]], state.unit, (unit) => choose({ unit }));
  drawPicker("pick-theme", [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], state.theme, setTheme);
}

function setTheme(theme) {
  state.theme = theme;
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  readPalette();
  redraw(true);
}

const palette = {};

/** Colours for the canvases, from the style sheet. */
function readPalette() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["paper", "panel", "ink", "soft", "line", "faint", "blue", "orange", "blue-rgb", "orange-rgb", "deep-rgb", "sans"]) {
    palette[name] = style.getPropertyValue("--" + name).trim();
  }
  const channels = (text) => text.split(",").map(Number);
  const hex = (text) => [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16));
  [palette.ground, palette.full] = [hex(palette.faint), channels(palette["blue-rgb"])];
  const stops = [hex(palette.panel), channels(palette["blue-rgb"]), channels(palette["deep-rgb"])];
  // 256 colours from paper over blue to deep; the exponent lifts small weights into view.
  palette.ramp = Array.from({ length: 256 }, (_, i) => {
    const place = (i / 255) ** 0.62 * 2;
    const low = Math.min(1, Math.floor(place));
    return stops[low].map((value, channel) => Math.round(value + (stops[low + 1][channel] - value) * (place - low)));
  });
  // The same as whole pixels, in the byte order of this machine.
  palette.pixels = new Uint32Array(Uint8Array.from(palette.ramp.flatMap((colour) => [...colour, 255])).buffer);
}
