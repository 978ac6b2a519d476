// Scaled dot-product attention of short sequences, forward and backward, one head at a time in the first-level cache:
//
//     Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V        (equation 1 of "Attention Is All You Need")
//
// The scores are kept transposed, a row for each key and a lane for each query. The maximum and the sum of a softmax
// are then taken over rows, lane by lane, and no step needs a sum across a register. Only queries are padded to whole
// vectors; padding lanes repeat the last query, so that nothing outside a tensor is read, and are never used.
#include <algorithm>
#include <utility>

#include "vectors.h"

// ---- Products and transposes of small matrices ----

// What a causal mask leaves of a product: all; in a query's row, the terms of keys up to it; in a key's row, the terms
// of queries from it on; in a query's column of scores, the rows of keys up to it.
enum Part { ALL, KEYS_SEEN, QUERIES_SEEING, SCORES_SEEN };

struct Product {            // out[row][column] = sum over term of left(row, term) * right[term][column]
    const float *left;      // left(row, term) is left[row * left_step + term], or, ACROSS, left[term * left_step + row]
    long left_step;
    const float *right;
    long right_step;
    float *out;
    long out_step;
};

// `rows` rows, at most HEIGHT, and WIDTH vectors of columns of a product: sums in registers of the terms before `to`.
template <int WIDTH, int HEIGHT, bool ACROSS>
INLINE void tile(int rows, int from, int to, Product p) {
    if constexpr (HEIGHT > 1)
        if (rows < HEIGHT) return tile<WIDTH, HEIGHT - 1, ACROSS>(rows, from, to, p);
    vec sums[HEIGHT][WIDTH] = {};
    const long row_step = ACROSS ? 1 : p.left_step, term_step = ACROSS ? p.left_step : 1;
    for (int term = from; term < to; term++) {
        vec right[WIDTH];
        UNROLL for (int w = 0; w < WIDTH; w++) right[w] = load(p.right + term * p.right_step + w * LANES);
        UNROLL for (int r = 0; r < HEIGHT; r++) {
            vec left = all(p.left[r * row_step + term * term_step]);
            UNROLL for (int w = 0; w < WIDTH; w++) sums[r][w] += left * right[w];
        }
    }
    UNROLL for (int r = 0; r < HEIGHT; r++)
        UNROLL for (int w = 0; w < WIDTH; w++) store(p.out + r * p.out_step + w * LANES, sums[r][w]);
}

// WIDTH vectors of columns of a product, the first of them column `first`, in tiles of nearly equal height.
template <int WIDTH, bool ACROSS>
static void strip(int rows, int terms, int first, Part part, Product p) {
    constexpr int MOST = WIDTH == 1 ? 8 : 12 / WIDTH;  // 8 sums hide the latency of an addition, 16 registers hold 12
    if (part == SCORES_SEEN) rows = std::min(rows, first + WIDTH * LANES);
    p.right += first, p.out += first;
    for (int row = 0, tiles = (rows + MOST - 1) / MOST; tiles > 0; tiles--) {
        int here = (rows - row + tiles - 1) / tiles, from = part == QUERIES_SEEING ? row : 0;
        int to = part == KEYS_SEEN ? std::min(terms, row + here) : terms;
        Product lower = p;
        lower.left += ACROSS ? row : row * p.left_step, lower.out += row * p.out_step;
        tile<WIDTH, MOST, ACROSS>(here, from, to, lower);
        row += here;
    }
}

template <bool ACROSS> static void multiply(int rows, int columns, int terms, Part part, Product p) {
    for (int first = 0, width; first < columns; first += width * LANES) {
        int vectors = (columns - first) / LANES;
        width = vectors == 1 || vectors == 3 ? vectors : 2;
        if (width == 1) strip<1, ACROSS>(rows, terms, first, part, p);
        if (width == 2) strip<2, ACROSS>(rows, terms, first, part, p);
        if (width == 3) strip<3, ACROSS>(rows, terms, first, part, p);
    }
}

// Exchanges the lanes of a whose number has the bit STEP with the lanes of b whose number has not.
template <int STEP, int... LANE>
INLINE void exchange(vec &a, vec &b, std::integer_sequence<int, LANE...>) {
    vec new_a = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + (LANE ^ STEP) : LANE)...);
    b = __builtin_shufflevector(a, b, (LANE & STEP ? LANES + LANE : (LANE ^ STEP))...);
    a = new_a;
}

template <int STEP> INLINE void transpose_block(vec *block) {
    UNROLL for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) exchange<STEP>(block[i], block[i + STEP], std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose_block<STEP / 2>(block);
}

// to[d][i] = from[i][d]; columns of `to` past the last row of `from` repeat it.
static void transpose(const float *from, long step, int rows, int D, float *to, int padded) {
    for (int i = 0; i < padded; i += LANES)
        for (int d = 0; d < D; d += LANES) {
            vec block[LANES];
            UNROLL for (int r = 0; r < LANES; r++) block[r] = load(from + std::min(i + r, rows - 1) * step + d);
            transpose_block<LANES / 2>(block);
            UNROLL for (int r = 0; r < LANES; r++) store(to + (long)(d + r) * padded + i, block[r]);
        }
}

// ---- The softmax ----

// The natural logarithm of a normal positive number: 2^whole * m with m from 0.75 to 1.5, and a series for log(m).
INLINE vec log(vec x) {
    ivec whole = ((ivec)x - 0x3f400000) >> 23;
    vec m = (vec)((ivec)x - (whole << 23)), s = (m - 1.0f) / (m + 1.0f), z = s * s;
    vec series = z * (z * (z * (z * (1 / 9.0f) + 1 / 7.0f) + 1 / 5.0f) + 1 / 3.0f) * s + s;
    return __builtin_convertvector(whole, vec) * 0.693147181f + 2.0f * series;
}

// Scores of LANES queries, which see the first `keys` of S keys, into probabilities; the result is their log-sum-exps.
static vec softmax(float *scores, const float *bias, int keys, int S, long step, float scale) {
    vec top = all(-INFINITY), total = {};
    for (int j = 0; j < keys; j++) top = larger(load(scores + j * step) * scale + load(bias + j * step), top);
    top = top == -INFINITY ? vec{} : top;
    for (int j = 0; j < keys; j++) {
        vec e = exp(load(scores + j * step) * scale + (load(bias + j * step) - top));
        store(scores + j * step, e);
        total += e;
    }
    vec inverse = 1.0f / total, factor = total == 0.0f ? vec{} : inverse;  // a query that may see no key: zeros
    for (int j = 0; j < keys; j++) store(scores + j * step, load(scores + j * step) * factor);
    for (int j = keys; j < S; j++) store(scores + j * step, vec{});
    return total > 0.0f ? top + log(total) : inverse;  // infinite, or a NaN
}

// Scores into probabilities once more, and the gradients of these into those of Q K^T. The probabilities are divided by
// their sum, which is 1 but for the rounding of `lse`: with scores near 10,000 that alone is a thousandth.
static void softmax_backward(float *scores, float *grads, vec lse, const float *bias, int keys, int S,
                             long step, float scale) {
    vec total = {}, mean = {};
    for (int j = 0; j < keys; j++) {
        vec e = exp(load(scores + j * step) * scale + (load(bias + j * step) - lse));
        store(scores + j * step, e);
        total += e;
        mean += e * load(grads + j * step);
    }
    vec factor = total == 0.0f ? vec{} : 1.0f / total;
    for (int j = 0; j < keys; j++) {
        vec p = load(scores + j * step) * factor;
        store(scores + j * step, p);
        store(grads + j * step, p * scale * (load(grads + j * step) - mean * factor));
    }
    for (int j = keys; j < S; j++) store(scores + j * step, vec{}), store(grads + j * step, vec{});
}

// ---- Heads ----

struct Tensor {  // [batch, head, position, D], the last dimension contiguous
    const float *data;
    const long *strides;
    const float *head(long b, long h) const { return data + b * strides[0] + h * strides[1]; }
};

struct Head { const float *q, *k, *v, *g; };  // where the rows of one head begin

struct Inputs {
    int D, B, H, T, S;
    Tensor q, k, v, g;
    const uint8_t *mask;
    const long *mask_strides;
    bool causal;
    int padded() const { return (T + LANES - 1) / LANES * LANES; }
    int keys(int query) const { return causal ? std::min(S, query + LANES) : S; }  // seen by LANES queries from this on
    Head head(int b, int h) const { return {q.head(b, h), k.head(b, h), v.head(b, h), g.head(b, h)}; }
    long result(int length, long b, long h) const { return (b * length * H + h) * D; }  // where a head's results begin
};

// Asks for rows of D floats before they are needed, to be read or written.
template <bool WRITE = false>
INLINE void fetch(const float *rows, int count, long step, int D) {
    for (int i = 0; i < count; i++)
        for (int d = 0; d < D; d += 16) __builtin_prefetch(rows + i * step + d, WRITE);
}

// What is added to the scores of one head: 0, or minus infinity where the masks forbid.
static void make_bias(const Inputs &in, int b, int h, float *bias) {
    const long none[4] = {}, *strides = in.mask ? in.mask_strides : none;
    const uint8_t open = 1, *mask = in.mask ? in.mask + b * strides[0] + h * strides[1] : &open;
    for (int j = 0; j < in.S; j++, bias += in.padded(), mask += strides[3]) {
        bool same = !in.causal && strides[2] == 0;  // for every query
        for (int i = 0; same && i < in.padded(); i += LANES) store(bias + i, all(*mask ? 0 : -INFINITY));
        for (int i = 0; !same && i < in.padded(); i++)
            bias[i] = mask[std::min(i, in.T - 1) * strides[2]] && !(in.causal && j > i) ? 0 : -INFINITY;
    }
}

// Calls work(b, h, this head, the next head) for every head, with its bias made.
template <class Work> static void each_head(const Inputs &in, float *bias, Work work) {
    for (int b = 0; b < in.B; b++)
        for (int h = 0; h < in.H; h++) {
            bool first = b == 0 && h == 0, other_mask = in.mask && (h == 0 || in.mask_strides[1] != 0);
            if (first || other_mask) make_bias(in, b, h, bias);
            Head next = h + 1 < in.H ? in.head(b, h + 1) : in.head(std::min(b + 1, in.B - 1), 0);
            work(b, h, in.head(b, h), next);
        }
}

// The floats that either function needs as its `room`.
extern "C" long attention_room(int D, int T, int S) {
    return (D + 3L * S + 1) * ((T + LANES - 1) / LANES * LANES);
}

// Strides are in elements: of batch, head and position; a mask (1: may attend) has batch, head, query and key. Results
// are contiguous: o, dq, dk and dv [batch, position, head, D], lse [batch, head, query]. `causal` is for T equal to S.
// Both functions return 0, or, if D is no multiple of 16, do nothing and return 1.
extern "C" int attention_forward(int D, int B, int H, int T, int S, const float *q, const long *qs, const float *k,
                                 const long *ks, const float *v, const long *vs, const uint8_t *mask, const long *ms,
                                 int causal, float scale, float *o, float *lse, float *room) {
    if (D % 16) return 1;
    const Inputs in = {D, B, H, T, S, {q, qs}, {k, ks}, {v, vs}, {q, qs}, mask, ms, causal != 0};
    const long N = in.padded(), step = (long)H * D;
    float *bias = room, *scores = bias + S * N, *columns = scores + S * N, *logs = columns + D * N;
    each_head(in, bias, [&](int b, int h, Head now, Head next) {
        float *out = o + in.result(T, b, h);
        fetch(next.q, T, qs[2], D);
        transpose(now.q, qs[2], T, D, columns, N);
        fetch(next.k, S, ks[2], D);
        multiply<false>(S, N, D, causal ? SCORES_SEEN : ALL, {now.k, ks[2], columns, N, scores, N});
        fetch(next.v, S, vs[2], D);
        fetch<true>(out, T, step, D);
        for (int i = 0; i < N; i += LANES)
            store(logs + i, softmax(scores + i, bias + i, in.keys(i), S, N, scale));
        std::memcpy(lse + ((long)b * H + h) * T, logs, T * sizeof(float));
        multiply<true>(T, D, S, causal ? KEYS_SEEN : ALL, {scores, N, now.v, vs[2], out, step});
    });
    return 0;
}

extern "C" int attention_backward(int D, int B, int H, int T, int S, const float *q, const long *qs, const float *k,
                                  const long *ks, const float *v, const long *vs, const uint8_t *mask, const long *ms,
                                  int causal, float scale, const float *g, const long *gs, const float *lse, float *dq,
                                  float *dk, float *dv, float *room) {
    if (D % 16) return 1;
    const Inputs in = {D, B, H, T, S, {q, qs}, {k, ks}, {v, vs}, {g, gs}, mask, ms, causal != 0};
    const Part seen = causal ? SCORES_SEEN : ALL, later = causal ? QUERIES_SEEING : ALL;
    const long N = in.padded(), step = (long)H * D;
    float *bias = room, *scores = bias + S * N, *grads = scores + S * N, *columns = grads + S * N;
    float *logs = columns + D * N;
    std::fill(logs, logs + N, 0.0f);
    each_head(in, bias, [&](int b, int h, Head now, Head next) {
        const long of_query = in.result(T, b, h), of_key = in.result(S, b, h);
        std::memcpy(logs, lse + ((long)b * H + h) * T, T * sizeof(float));
        fetch(next.q, T, qs[2], D);
        transpose(now.q, qs[2], T, D, columns, N);
        fetch(next.k, S, ks[2], D);
        multiply<false>(S, N, D, seen, {now.k, ks[2], columns, N, scores, N});
        fetch(next.g, T, gs[2], D);
        transpose(now.g, gs[2], T, D, columns, N);
        fetch(next.v, S, vs[2], D);
        multiply<false>(S, N, D, seen, {now.v, vs[2], columns, N, grads, N});
        fetch<true>(dv + of_key, S, step, D);
        for (int i = 0; i < N; i += LANES)
            softmax_backward(scores + i, grads + i, load(logs + i), bias + i, in.keys(i), S, N, scale);
        fetch<true>(dk + of_key, S, step, D);
        multiply<false>(S, D, T, later, {scores, N, now.g, gs[2], dv + of_key, step});
        fetch<true>(dq + of_query, T, step, D);
        multiply<false>(S, D, T, later, {grads, N, now.q, qs[2], dk + of_key, step});
        multiply<true>(T, D, S, causal ? KEYS_SEEN : ALL, {grads, N, now.k, ks[2], dq + of_query, step});
    });
    return 0;
}
