// LayerNorm(x + Dropout(u)), section 3.1 of "Attention Is All You Need", forward and backward in one pass each.
//
// rows: positions · d = d_model, a multiple of LANES. `draws` [rows, d] are random 16-bit numbers, an entry of u is
// dropped where its draw is below `lowest_kept`, and grows by `scale` where it is kept (modeling/dropout.py).
#include "vectors.h"

typedef int16_t shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vec keep(const int16_t *draws, int lowest_kept, float scale) {
    ivec drawn = __builtin_convertvector(*(const shorts *)draws, ivec);
    return drawn >= (ivec{} + lowest_kept) ? all(scale) : vec{};
}

// y [rows, d] and what the way back needs: normed = (z - mean) / deviation [rows, d], 1 / deviation [rows]; z = x + u'.
extern "C" void add_norm(long rows, long d, const float *x, const float *u, const int16_t *draws, int lowest_kept,
                         float scale, const float *gain, const float *bias, float eps, float *y, float *normed,
                         float *inverse) {
    for (long r = 0; r < rows; r++, x += d, u += d, draws += d, y += d, normed += d) {
        vec total{}, squares{};
        for (long f = 0; f < d; f += LANES) {
            vec z = load(x + f) + load(u + f) * keep(draws + f, lowest_kept, scale);
            total += z;
            store(normed + f, z);
        }
        float mean = sum(total) / d;
        for (long f = 0; f < d; f += LANES) {
            vec off = load(normed + f) - mean;
            squares += off * off;
        }
        float variance = sum(squares) / d;
        inverse[r] = variance < INFINITY ? 1 / sqrtf(variance + eps) : NAN;  // not 0, which would hide it
        for (long f = 0; f < d; f += LANES) {
            vec value = (load(normed + f) - mean) * inverse[r];
            store(normed + f, value);
            store(y + f, value * load(gain + f) + load(bias + f));
        }
    }
}

// Gradients of x, u, gain and bias out of that of y, `grad` [rows, d]; those of gain and bias [d] are added up.
extern "C" void add_norm_backward(long rows, long d, const float *grad, const float *normed, const float *inverse,
                                  const int16_t *draws, int lowest_kept, float scale, const float *gain, float *grad_x,
                                  float *grad_u, float *grad_gain, float *grad_bias) {
    for (long r = 0; r < rows; r++, grad += d, normed += d, draws += d, grad_x += d, grad_u += d) {
        vec total{}, along{};
        for (long f = 0; f < d; f += LANES) {
            vec g = load(grad + f), n = load(normed + f), scaled = g * load(gain + f);
            total += scaled;
            along += scaled * n;
            store(grad_gain + f, load(grad_gain + f) + g * n);
            store(grad_bias + f, load(grad_bias + f) + g);
        }
        float mean = sum(total) / d, slope = sum(along) / d;
        for (long f = 0; f < d; f += LANES) {
            vec z = (load(grad + f) * load(gain + f) - mean - load(normed + f) * slope) * inverse[r];
            store(grad_x + f, z);
            store(grad_u + f, z * keep(draws + f, lowest_kept, scale));
        }
    }
}
