// Products a tile at a time: ROWS rows and 16 columns of the result stay in registers while their factors pass by.
#pragma once
#include "vectors.h"

constexpr long PANEL = 16;            // columns of a tile
constexpr int PARTS = PANEL / LANES;  // registers of a tile's row

INLINE long up(long count, long step) { return (count + step - 1) / step * step; }

struct Tile {
    vec part[ROWS][PARTS];
};

INLINE Tile take(const float *from, long stride) {
    Tile tile;
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int i = 0; i < PARTS; i++)
        tile.part[r][i] = load(from + r * stride + i * LANES);
    return tile;
}

INLINE void put(const Tile &tile, float *to, long stride) {
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int i = 0; i < PARTS; i++)
        store(to + r * stride + i * LANES, tile.part[r][i]);
}

// tile[r][0..16) += a[r * stride] * b[0..16)
INLINE void add_outer(Tile &tile, const float *a, long stride, const float *b) {
    vec column[PARTS];
    UNROLL for (int i = 0; i < PARTS; i++) column[i] = load(b + i * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int i = 0; i < PARTS; i++)
        tile.part[r][i] += a[r * stride] * column[i];
}
