// y = x W^T + b, with or without ReLU, and its gradients, for the matrices of a small model.
//
// W [outputs, inputs], both multiples of 16. A library's product lays out its factors anew each time; here x and y are
// read and written as they lie, and a chunk's gradient is in the cache for all that is made of it.
#include "tiles.h"

constexpr long CHUNK = 120;  // rows that a second-level cache holds of x and of the gradient; a multiple of ROWS

// Columns of a matrix [rows, columns] in panels of 16, [columns / 16][rows][16].
static void by_column(const float *matrix, long rows, long columns, float *panels) {
    for (long c = 0; c < columns; c += PANEL)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < PANEL; i += LANES)
                store(panels + c * rows + r * PANEL + i, load(matrix + r * columns + c + i));
}

// The same of the transposed matrix, [rows / 16][columns][16].
static void by_row(const float *matrix, long rows, long columns, float *panels) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++)
            panels[(r / PANEL * columns + c) * PANEL + r % PANEL] = matrix[r * columns + c];
}

// result [rows, columns] = a [rows, inner] times panels [columns / 16][inner][16]. At least ROWS rows: the last tile
// goes over some of those before it again.
static void product(long rows, long inner, long columns, const float *a, const float *panels, const float *bias,
                    bool relu, float *result) {
    for (long next = 0; next < rows; next += ROWS) {
        long r = next + ROWS <= rows ? next : rows - ROWS;
        for (long c = 0; c < columns; c += PANEL) {
            Tile tile = bias ? take(bias + c, 0) : Tile{};
            for (long k = 0; k < inner; k++) add_outer(tile, a + r * inner + k, inner, panels + c * inner + k * PANEL);
            if (relu)
                UNROLL for (int row = 0; row < ROWS; row++) UNROLL for (int i = 0; i < PARTS; i++)
                    tile.part[row][i] = larger(tile.part[row][i], vec{});
            put(tile, result + r * columns + c, columns);
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

extern "C" long linear_room(long outputs, long inputs) {
    return outputs * inputs + up(outputs, ROWS) * inputs + (CHUNK + ROWS) * (outputs + inputs);
}

// x [rows, inputs] -> y [rows, outputs]; rows >= ROWS.
extern "C" void linear(long rows, long outputs, long inputs, const float *x, const float *weight, const float *bias,
                       int relu, float *y, float *room) {
    by_row(weight, outputs, inputs, room);
    product(rows, inputs, outputs, x, room, bias, relu, y);
}

// Gradients of x, W and b out of that of y. `y` is needed for ReLU alone, null without it.
extern "C" void linear_backward(long rows, long outputs, long inputs, const float *x, const float *weight,
                                const float *y, const float *grad, float *grad_x, float *grad_weight, float *grad_bias,
                                float *room) {
    float *weight_panels = room, *sums = room + outputs * inputs, *panels = sums + up(outputs, ROWS) * inputs;
    float *masked = panels + (CHUNK + ROWS) * inputs;
    by_column(weight, outputs, inputs, weight_panels);
    memset(sums, 0, up(outputs, ROWS) * inputs * sizeof(float));
    memset(grad_bias, 0, outputs * sizeof(float));
    for (long n = 0, count; n < rows; n += count) {
        count = rows - n < CHUNK + ROWS ? rows - n : CHUNK;  // what is left over is never less than ROWS
        const float *g = grad + n * outputs;
        if (y) before_relu(count * outputs, g, y + n * outputs, masked), g = masked;
        product(count, outputs, inputs, g, weight_panels, nullptr, false, grad_x + n * inputs);
        by_column(x + n * inputs, count, inputs, panels);
        add_grad_weight(count, outputs, inputs, g, panels, sums);
        for (long r = 0; r < count; r++)
            for (long o = 0; o < outputs; o += LANES) store(grad_bias + o, load(grad_bias + o) + load(g + r * outputs + o));
    }
    long whole = outputs / ROWS * ROWS;
    memcpy(grad_weight, sums, whole * inputs * sizeof(float));
    if (whole < outputs)
        memcpy(grad_weight + (outputs - ROWS) * inputs, sums + whole * inputs, ROWS * inputs * sizeof(float));
}
