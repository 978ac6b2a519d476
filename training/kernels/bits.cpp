// Random bits for dropout: xoshiro128++ (Blackman and Vigna 2021, "Scrambled linear pseudorandom number generators"),
// eight of them side by side, begun by splitmix64 out of one seed. The same bits on every processor.
#include <cstdint>
#include <cstring>

typedef uint32_t words __attribute__((vector_size(32)));

static uint64_t splitmix(uint64_t &state) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static words turned(words x, int by) { return x << by | x >> (32 - by); }

// `count` numbers of 16 bits.
extern "C" void draw_bits(uint64_t seed, long count, int16_t *bits) {
    words s[4];
    for (int lane = 0; lane < 8; lane++)
        for (int i = 0; i < 4; i += 2) {
            uint64_t pair = splitmix(seed);
            s[i][lane] = (uint32_t)pair, s[i + 1][lane] = (uint32_t)(pair >> 32);
        }
    const long at_once = sizeof(words) / sizeof(int16_t);
    for (long start = 0; start < count; start += at_once) {
        words drawn = turned(s[0] + s[3], 7) + s[0], shifted = s[1] << 9;
        s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3], s[2] ^= shifted, s[3] = turned(s[3], 11);
        memcpy(bits + start, &drawn, (count - start < at_once ? count - start : at_once) * sizeof(int16_t));
    }
}
