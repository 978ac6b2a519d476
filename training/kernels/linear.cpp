// y = x W^T + b, with or without ReLU, and its gradients, for the matrices of a small model.
//
// W [outputs, inputs], both multiples of 16. A library's product lays out its factors anew each time; here x and y are
// read and written as they lie, and a chunk's gradient is in the cache for all that is made of it.
#include "tiles.h"

constexpr long CHUNK = 120;  // rows that a second-level cache holds of x and of the gradient; a multiple of ROWS

// Columns of a matrix [rows, columns] in panels of 16, [columns / 16][rows][16].
static void by_column(const float *matrix, long rows, long columns, float *panels) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c += PANEL)
            for (long i = 0; i < PANEL; i += LANES)
                store(panels + c * rows + r * PANEL + i, load(matrix + r * columns + c + i));
}

// The same of the transposed matrix, [rows / 16][columns][16].
static void by_row(const float *matrix, long rows, long columns, float *panels) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++)
            panels[(r / PANEL * columns + c) * PANEL + r % PANEL] = matrix[r * columns + c];
}

// result [rows, columns] = a [rows, inner] times panels [columns / 16][inner][16], or, `add`, that much more. At least
// ROWS rows: the last tile begins before the rows that are left, and what it would add to those once more it leaves out.
// `soon` [rows, columns], if there is one, is asked for on the way.
static void product(long rows, long inner, long columns, const float *a, const float *panels, const float *bias,
                    bool relu, bool add, float *result, const float *soon) {
    for (long next = 0; next < rows; next += ROWS) {
        long r = next + ROWS <= rows ? next : rows - ROWS;
        fetch(a + (next + ROWS) * inner, ROWS * inner);
        fetch(result + (next + ROWS) * columns, ROWS * columns);
        if (soon) fetch(soon + r * columns, ROWS * columns);
        for (long c = 0; c < columns; c += PANEL) {
            float *to = result + r * columns + c;
            Tile tile = add ? take(to, columns) : bias ? take(bias + c, 0) : Tile{};
            const Tile before = tile;
            for (long k = 0; k < inner; k++) add_outer(tile, a + r * inner + k, inner, panels + c * inner + k * PANEL);
            if (relu)
                UNROLL for (int row = 0; row < ROWS; row++) UNROLL for (int i = 0; i < PARTS; i++)
                    tile.part[row][i] = larger(tile.part[row][i], vec{});
            if (add && r < next)
                UNROLL for (int row = 0; row < ROWS; row++) UNROLL for (int i = 0; i < PARTS; i++)
                    if (r + row < next) tile.part[row][i] = before.part[row][i];
            put(tile, to, columns);
        }
    }
}

// sums [outputs up to ROWS, inputs] += grad^T x, x in panels. The last tile's rows are the last ROWS of the outputs.
static void add_grad_weight(long rows, long outputs, long inputs, const float *grad, const float *panels, float *sums) {
    for (long i = 0; i < inputs; i += PANEL)
        for (long next = 0; next < outputs; next += ROWS) {
            long o = next + ROWS <= outputs ? next : outputs - ROWS;
            Tile tile = take(sums + next * inputs + i, inputs);
            for (long r = 0; r < rows; r++) add_outer(tile, grad + r * outputs + o, 1, panels + i * rows + r * PANEL);
            put(tile, sums + next * inputs + i, inputs);
        }
}

// The gradient before ReLU: nothing where y is not above 0. NaN stays.
static void before_relu(long count, const float *grad, const float *y, float *result) {
    for (long i = 0; i < count; i += LANES) store(result + i, load(y + i) <= vec{} ? vec{} : load(grad + i));
}

// Some layers of one size may share an input: W, b, y and their gradients are then lists of so many pointers.
extern "C" long linear_room(long layers, long outputs, long inputs) {
    return layers * (outputs + up(outputs, ROWS)) * inputs + (CHUNK + ROWS) * (outputs + inputs);
}

// What is left over after a chunk of rows is never less than ROWS.
static long chunk(long left) { return left < CHUNK + ROWS ? left : CHUNK; }

// x [rows, inputs] -> each y [rows, outputs]; rows >= ROWS.
extern "C" void linear(long rows, long layers, long outputs, long inputs, const float *x, const float *const *weight,
                       const float *const *bias, int relu, float *const *y, float *room) {
    for (long l = 0; l < layers; l++) by_row(weight[l], outputs, inputs, room + l * outputs * inputs);
    for (long n = 0, count; n < rows; n += count) {
        count = chunk(rows - n);
        for (long l = 0; l < layers; l++)
            product(count, inputs, outputs, x + n * inputs, room + l * outputs * inputs, bias[l], relu, false,
                    y[l] + n * outputs, nullptr);
    }
}

static void add_up_rows(long rows, long columns, const float *matrix, float *sums) {
    for (long r = 0; r < rows; r++, matrix += columns)
        for (long c = 0; c < columns; c += LANES) store(sums + c, load(sums + c) + load(matrix + c));
}

// Gradients of x, each W and each b out of those of y. `y` is needed for the ReLU of one layer alone, null without it.
extern "C" void linear_backward(long rows, long layers, long outputs, long inputs, const float *x,
                                const float *const *weight, const float *y, const float *const *grad, float *grad_x,
                                float *const *grad_weight, float *const *grad_bias, float *room) {
    const long size = outputs * inputs, sums_size = up(outputs, ROWS) * inputs;
    float *weight_panels = room, *sums = room + layers * size, *panels = sums + layers * sums_size;
    float *masked = panels + (CHUNK + ROWS) * inputs;
    memset(sums, 0, layers * sums_size * sizeof(float));
    for (long l = 0; l < layers; l++) {
        by_column(weight[l], outputs, inputs, weight_panels + l * size);
        memset(grad_bias[l], 0, outputs * sizeof(float));
    }
    for (long n = 0, count; n < rows; n += count) {
        count = chunk(rows - n);
        for (long l = 0; l < layers; l++) {
            const float *g = grad[l] + n * outputs;
            if (y) before_relu(count * outputs, g, y + n * outputs, masked), g = masked;
            product(count, outputs, inputs, g, weight_panels + l * size, nullptr, false, l > 0, grad_x + n * inputs,
                    l == 0 ? x + n * inputs : nullptr);
            if (l == 0) by_column(x + n * inputs, count, inputs, panels);
            add_grad_weight(count, outputs, inputs, g, panels, sums + l * sums_size);
            add_up_rows(count, outputs, g, grad_bias[l]);
        }
    }
    const long whole = outputs / ROWS * ROWS * inputs, last = (outputs - ROWS) * inputs;
    for (long l = 0; l < layers; l++) {
        memcpy(grad_weight[l], sums + l * sums_size, whole * sizeof(float));
        if (whole < size) memcpy(grad_weight[l] + last, sums + l * sums_size + whole, ROWS * inputs * sizeof(float));
    }
}
