// The projection to the vocabulary, its cross-entropy and both gradients in one pass: the formulas of modeling/loss.py.
//
// rows: target positions · V vocabulary · d = d_model, a multiple of 16
//
// The logits of a chunk of rows are made once and never moved. They lie in panels of 16 entries of the vocabulary,
// [V / 16][rows][16], which serve three products as they are: written by  h W^T, read by  E W  and by  E^T h,
// where E = exp(logits - row's highest). Division by the row's sum is left to the end of one and put before the other.
#include "tiles.h"

constexpr long CHUNK = 144;  // rows of a chunk: a multiple of ROWS; twice and half as many are as fast
constexpr long PANELS_AT_ONCE = 8;       // of W in E W: as many as a first-level cache holds
constexpr long IGNORED = -100;

// What a call needs beside its results.
struct Room {
    float *by_entry;      // W in panels of 16 entries, [V / 16][d][16]
    float *by_feature;    // W in panels of 16 features, [d / 16][V][16]
    float *grad_panels;   // the gradient of W in panels of 16 entries, [V / 16][d up to ROWS][16]
    float *exponentials;  // E, [V / 16][rows][16]
    float *hidden, *grad; // of a chunk, [rows][d]
    float *scaled;        // h / sum, in tiles of ROWS features, [d / ROWS][rows][ROWS]
    float *highest, *sums;                  // [rows][16]
    float *at_target, *inverse;             // [rows]
    float *weight_sum, *hidden_sum;         // [d]
    long floats;

    Room(float *start, long V, long d) {
        long entries = up(V, PANEL), features = up(d, ROWS), used = 0;
        auto next = [&](long count) {
            float *place = start + used;
            used += count;
            return place;
        };
        by_entry = next(entries * d), by_feature = next(entries * d), grad_panels = next(entries * features);
        exponentials = next(entries * CHUNK), hidden = next(CHUNK * d), grad = next(CHUNK * d);
        scaled = next(features * CHUNK), highest = next(CHUNK * PANEL), sums = next(CHUNK * PANEL);
        at_target = next(CHUNK), inverse = next(CHUNK), weight_sum = next(d), hidden_sum = next(d);
        floats = used;
    }
};

static void lay_out_weight(const Room &room, const float *weight, long V, long d) {
    long entries = up(V, PANEL);
    for (long v = 0; v < V; v++)
        for (long f = 0; f < d; f++) room.weight_sum[f] += weight[v * d + f];
    for (long v = 0; v < entries; v++) {
        const float *row = weight + v * d;
        float *across = room.by_entry + v / PANEL * PANEL * d + v % PANEL;
        for (long f = 0; f < d; f++) across[f * PANEL] = v < V ? row[f] : 0;
        for (long f = 0; f < d; f += LANES) {
            float *along = room.by_feature + (f / PANEL * entries + v) * PANEL + f % PANEL;
            store(along, v < V ? load(row + f) : vec{});
        }
    }
}

// E = h W^T, and each row's highest.
static void logits(const Room &room, long rows, long V, long d) {
    for (long i = 0; i < rows * PANEL; i++) room.highest[i] = -INFINITY;
    for (long v = 0; v < V; v += PANEL) {
        float *panel = room.exponentials + v * rows;
        const float *weight = room.by_entry + v * d;
        for (long r = 0; r < rows; r += ROWS) {
            const float *hidden = room.hidden + r * d;
            Tile tile{};
            for (long f = 0; f < d; f++) add_outer(tile, hidden + f, d, weight + f * PANEL);
            put(tile, panel + r * PANEL, PANEL);
        }
        for (long r = 0; v + PANEL > V && r < rows; r++)  // entries that only fill up the last panel
            for (long i = V - v; i < PANEL; i++) panel[r * PANEL + i] = -INFINITY;
        for (long i = 0; i < rows * PANEL; i += LANES)
            store(room.highest + i, larger(load(room.highest + i), load(panel + i)));
    }
}

static void note_targets(const Room &room, long rows, long counted, const int64_t *labels) {
    for (long r = 0; r < rows; r++) {
        float *row = room.highest + r * PANEL, most = row[0];
        for (long i = 1; i < PANEL; i++) most = row[i] > most ? row[i] : most;
        for (long i = 0; i < PANEL; i++) row[i] = most;
        long target = r < counted ? labels[r] : IGNORED;
        room.at_target[r] = target < 0 ? 0 : room.exponentials[(target / PANEL * rows + r) * PANEL + target % PANEL];
    }
}

static void exponentials(const Room &room, long rows, long V) {
    memset(room.sums, 0, rows * PANEL * sizeof(float));
    for (long v = 0; v < V; v += PANEL) {
        float *panel = room.exponentials + v * rows;
        for (long i = 0; i < rows * PANEL; i += LANES) {
            vec e = exp(load(panel + i) - load(room.highest + i));
            store(panel + i, e);
            store(room.sums + i, load(room.sums + i) + e);
        }
    }
}

// The chunk's loss; `inverse` is 1 / sum, 0 where nothing counts; h / sum is laid out for the product with E^T.
static double losses(const Room &room, long rows, long counted, const int64_t *labels, long d, float share, float rest) {
    double total = 0;
    for (long r = 0; r < rows; r++) {
        const float *hidden = room.hidden + r * d;
        float sum = 0, dot = 0;
        for (long i = 0; i < PANEL; i++) sum += room.sums[r * PANEL + i];
        room.inverse[r] = r < counted && labels[r] != IGNORED ? 1 / sum : 0;
        for (long f = 0; f < up(d, ROWS); f++)
            room.scaled[(f / ROWS * rows + r) * ROWS + f % ROWS] = f < d ? hidden[f] * room.inverse[r] : 0;
        if (r >= counted || labels[r] == IGNORED) continue;
        for (long f = 0; f < d; f++) dot += hidden[f] * room.weight_sum[f];
        total += room.highest[r * PANEL] + logf(sum) - rest * room.at_target[r] - share * dot;
    }
    return total;
}

// grad += E W and grad_panels += (E / sum)^T h, for some panels of E, which are in a cache for both.
static void products(const Room &room, long rows, long first, long panels, long V, long d) {
    long entries = up(V, PANEL), features = up(d, ROWS);
    for (long f = 0; f < d; f += PANEL)
        for (long r = 0; r < rows; r += ROWS) {
            const float *weight = room.by_feature + (f / PANEL * entries + first * PANEL) * PANEL;
            float *grad = room.grad + r * d + f;
            Tile tile = take(grad, d);
            for (long p = first; p < first + panels; p++)
                for (long i = 0; i < PANEL; i++, weight += PANEL)
                    add_outer(tile, room.exponentials + (p * rows + r) * PANEL + i, PANEL, weight);
            put(tile, grad, d);
        }
    for (long p = first; p < first + panels; p++)
        for (long f = 0; f < features; f += ROWS) {
            float *grad = room.grad_panels + (p * features + f) * PANEL;
            Tile tile = take(grad, PANEL);
            for (long r = 0; r < rows; r++)
                add_outer(tile, room.scaled + f * rows + r * ROWS, 1, room.exponentials + (p * rows + r) * PANEL);
            put(tile, grad, PANEL);
        }
}

// What the product E W lacks of the gradient of h:  / sum - q W.
static void finish_hidden(const Room &room, long counted, const int64_t *labels, const float *weight, long d,
                          float share, float rest, float *grad_hidden) {
    for (long r = 0; r < counted; r++, grad_hidden += d) {
        memset(grad_hidden, 0, d * sizeof(float));
        if (labels[r] == IGNORED) continue;
        const float *target = weight + labels[r] * d, *product = room.grad + r * d;
        for (long f = 0; f < d; f++)
            grad_hidden[f] = product[f] * room.inverse[r] - share * room.weight_sum[f] - rest * target[f];
    }
}

// The gradient of W out of its panels, less q^T h.
static void finish_weight(const Room &room, long rows, const int64_t *labels, const float *hidden, long V, long d,
                          float share, float rest, float *grad_weight) {
    long features = up(d, ROWS);
    for (long r = 0; r < rows; r++)
        for (long f = 0; labels[r] != IGNORED && f < d; f++) room.hidden_sum[f] += hidden[r * d + f];
    for (long v = 0; v < V; v++) {
        const float *across = room.grad_panels + v / PANEL * PANEL * features + v % PANEL;
        for (long f = 0; f < d; f++) grad_weight[v * d + f] = across[f * PANEL] - share * room.hidden_sum[f];
    }
    for (long r = 0; r < rows; r++)
        for (long f = 0; labels[r] != IGNORED && f < d; f++)
            grad_weight[labels[r] * d + f] -= rest * hidden[r * d + f];
}

extern "C" long loss_room(long V, long d) { return Room(nullptr, V, d).floats; }

// The sum of losses; grad_hidden [N, d] and grad_weight [V, d] are overwritten. Labels are within [0, V) or -100.
extern "C" double loss_and_gradients(long N, long V, long d, const float *hidden, const float *weight,
                                     const int64_t *labels, float smoothing, float *grad_hidden, float *grad_weight,
                                     float *start) {
    Room room(start, V, d);
    float share = smoothing / V, rest = 1 - smoothing;
    double total = 0;
    memset(room.weight_sum, 0, 2 * d * sizeof(float));  // and hidden_sum, which follows
    lay_out_weight(room, weight, V, d);
    memset(room.grad_panels, 0, up(V, PANEL) * up(d, ROWS) * sizeof(float));
    for (long n = 0; n < N; n += CHUNK) {
        long counted = N - n < CHUNK ? N - n : CHUNK, rows = up(counted, ROWS), panels = up(V, PANEL) / PANEL;
        memcpy(room.hidden, hidden + n * d, counted * d * sizeof(float));
        memset(room.hidden + counted * d, 0, (rows - counted) * d * sizeof(float));
        memset(room.grad, 0, rows * d * sizeof(float));
        logits(room, rows, V, d);
        note_targets(room, rows, counted, labels + n);
        exponentials(room, rows, V);
        total += losses(room, rows, counted, labels + n, d, share, rest);
        for (long p = 0; p < panels; p += PANELS_AT_ONCE)
            products(room, rows, p, panels - p < PANELS_AT_ONCE ? panels - p : PANELS_AT_ONCE, V, d);
        finish_hidden(room, counted, labels + n, weight, d, share, rest, grad_hidden + n * d);
    }
    finish_weight(room, N, labels, hidden, V, d, share, rest, grad_weight);
    return total;
}
