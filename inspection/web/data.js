// The numbers of this page: decoded once, turned into matrices when they are asked for.

const data = JSON.parse(document.getElementById("data").textContent);

/** Bytes of a base64 text, inflated where the page was written with compression. */
async function bytesOf(id) {
  const text = document.getElementById(id).textContent.trim();
  if (!text) return new Uint8Array(0);
  let packed;
  if (Uint8Array.fromBase64) {
    packed = Uint8Array.fromBase64(text);
  } else {
    const raw = atob(text);
    packed = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  }
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The weights as they are stored: 16 bits in equal steps, or 8 bits in steps of the square root (long sentences). */
const store = { codes: null, toWeight: null, cache: new Map() };

async function loadWeights() {
  const bytes = await bytesOf("weights");
  if (data.bits === 16) {
    store.codes = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.byteLength >> 1);
    store.toWeight = (code) => code / 65535;
  } else {
    const table = Float32Array.from({ length: 256 }, (_, code) => (code / 255) ** 2);
    store.codes = bytes;
    store.toWeight = (code) => table[code];
  }
}

/** Which list of tokens asks and which is asked, for "encoder", "decoder" and "cross". */
function sides(kind) {
  return {
    encoder: { rows: data.source, cols: data.source },
    decoder: { rows: data.written, cols: data.read },
    cross: { rows: data.written, cols: data.source },
  }[kind];
}

/** What is shown of a token list: its pieces, or its words. */
function unitsOf(list, unit) {
  return unit === "word" ? list.words : list.tokens;
}

/** Weights [tokens, tokens] of one head of one layer. */
function tokenMatrix(kind, layer, head) {
  const { heads, rows, cols, offset } = data.maps[kind];
  const size = rows * cols;
  const start = offset + (layer * heads + head) * size;
  const values = new Float32Array(size);
  for (let i = 0; i < size; i++) values[i] = store.toWeight(store.codes[start + i]);
  return { rows, cols, values };
}

/** Pieces become words: weights of an asked word's pieces are added, an asking word's pieces are averaged. */
function mergeWords(matrix, rowList, colList) {
  const rows = rowList.words.length;
  const cols = colList.words.length;
  const values = new Float32Array(rows * cols);
  const pieces = new Float32Array(rows);
  for (let r = 0; r < matrix.rows; r++) pieces[rowList.groups[r]] += 1;
  for (let r = 0; r < matrix.rows; r++) {
    const row = rowList.groups[r];
    for (let c = 0; c < matrix.cols; c++) {
      values[row * cols + colList.groups[c]] += matrix.values[r * matrix.cols + c] / pieces[row];
    }
  }
  return { rows, cols, values };
}

/** Weights of one head, or the mean of all heads for head = -1, in the chosen units. Kept after the first time. */
function matrixOf(kind, layer, head, unit) {
  const key = [kind, layer, head, unit].join();
  const known = store.cache.get(key);
  if (known) return known;
  let matrix;
  if (head < 0) {
    const { heads } = data.maps[kind];
    for (let h = 0; h < heads; h++) {
      const one = matrixOf(kind, layer, h, unit);
      if (!matrix) matrix = { rows: one.rows, cols: one.cols, values: new Float32Array(one.values.length) };
      for (let i = 0; i < one.values.length; i++) matrix.values[i] += one.values[i] / heads;
    }
  } else {
    matrix = tokenMatrix(kind, layer, head);
    if (unit === "word") matrix = mergeWords(matrix, sides(kind).rows, sides(kind).cols);
  }
  store.cache.set(key, matrix);
  return matrix;
}

/** The largest weight, for the colour scale. */
function topOf(matrix) {
  let top = 0;
  for (const value of matrix.values) if (value > top) top = value;
  return top;
}
