// Quantised weights: as a GGUF file has them, and packed for the products.
//
// Packed are 16 rows at a time, a stripe: the weights k..k+3 of its 16 rows lie in one line of 64 bytes, row r at byte
// 4 r. So a register of 64 bytes holds four weights of 16 rows, one of 32 bytes those of 8. Of the eight groups of four in
// 32 weights, the low nibbles of line l hold group l and the high nibbles group l + 4. All weights are stored without
// sign: what a format subtracts from them (Offset) is taken from the sums instead.
#pragma once
#include <cstdint>

namespace puna {

constexpr int rows_of_stripe = 16;
constexpr int line = 64;

// ggml's numbers.
enum Type : int {
  type_f32 = 0,
  type_f16 = 1,
  type_q4_0 = 2,
  type_q4_1 = 3,
  type_q5_0 = 6,
  type_q5_1 = 7,
  type_q8_0 = 8,
  type_q2_k = 10,
  type_q3_k = 11,
  type_q4_k = 12,
  type_q5_k = 13,
  type_q6_k = 14,
  type_iq4_nl = 20,
  type_iq4_xs = 23,
  type_bf16 = 30,
  type_mxfp4 = 39,
};

typedef uint16_t half;    // IEEE 754 binary16
typedef uint16_t bfloat;  // the upper half of a float

// ---- in the file

struct FileQ4_0 { half d; uint8_t q[16]; };                                   // d (q - 8)
struct FileQ4_1 { half d, m; uint8_t q[16]; };                                // d q + m
struct FileQ5_0 { half d; uint8_t h[4]; uint8_t q[16]; };                     // d (q - 16), h the fifth bits
struct FileQ5_1 { half d, m; uint8_t h[4]; uint8_t q[16]; };                  // d q + m
struct FileQ8_0 { half d; int8_t q[32]; };                                    // d q
struct FileQ2_K { uint8_t s[16]; uint8_t q[64]; half d, m; };                 // d s q - m t, 16 x 16; s and t of 4 bits
struct FileQ3_K { uint8_t h[32], q[64], s[12]; half d; };                     // d (s - 32) (q - 4), 16 x 16; s of 6 bits
struct FileQ4_K { half d, m; uint8_t s[12]; uint8_t q[128]; };                // d s q - m t, 8 x 32; s and t of 6 bits
struct FileQ5_K { half d, m; uint8_t s[12]; uint8_t h[32]; uint8_t q[128]; };
struct FileQ6_K { uint8_t q[128], h[64]; int8_t s[16]; half d; };             // d s (q - 32), 16 x 16
struct FileIQ4_XS { half d; uint16_t h; uint8_t s[4]; uint8_t q[128]; };      // d (s - 32) table[q], 8 x 32
struct FileMXFP4 { uint8_t e; uint8_t q[16]; };                               // 2^(e - 128) fourbits[q]
struct FileHalves { uint16_t q[32]; };                                        // F16 and BF16, of which 32 are taken as a block
struct FileFloats { float q[32]; };                                           // F32, in the same way
static_assert(sizeof(FileMXFP4) == 17, "");
static_assert(sizeof(FileQ4_0) == 18 && sizeof(FileQ4_1) == 20 && sizeof(FileQ5_0) == 22 && sizeof(FileQ5_1) == 24, "");
static_assert(sizeof(FileQ8_0) == 34 && sizeof(FileQ4_K) == 144 && sizeof(FileQ5_K) == 176 && sizeof(FileQ6_K) == 210, "");
static_assert(sizeof(FileIQ4_XS) == 136 && sizeof(FileQ2_K) == 84 && sizeof(FileQ3_K) == 110, "");

// The values of IQ4_NL and IQ4_XS, and the same as packed: without sign, so 128 more.
constexpr int8_t nonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The values of MXFP4, doubled as they are multiplied with half of what the exponent says.
constexpr int8_t fourbits[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// ---- packed. Blocks of 32 weights, where lines would not be whole several of them together.

struct alignas(64) PackedQ4_0 { uint8_t q[2][4][line]; half d[2][16]; };                         // 4.5 bits a weight
struct alignas(64) PackedQ4_1 { uint8_t q[4][line]; half d[16], m[16]; };                        // 5
struct alignas(64) PackedQ5_0 { uint8_t q[2][4][line], h[2][line]; half d[2][16]; };             // 5.5; bit g of h: of group g
struct alignas(64) PackedQ5_1 { uint8_t q[4][line], h[line]; half d[16], m[16]; };               // 6
struct alignas(64) PackedQ8_0 { uint8_t q[2][8][line]; half d[2][16]; };                         // 8.5
struct alignas(64) PackedMXFP4 { uint8_t q[4][4][line]; uint8_t e[4][16]; };                     // 4.25
struct alignas(64) PackedF32 { float q[32][16]; };                                               // row r's weight k: [k][r]
struct alignas(64) PackedF16 { half q[32][16]; };                                                // the same
struct alignas(64) PackedBF16 { bfloat q[16][16][2]; };                                          // [k / 2][r][k % 2]
// Blocks of 256 weights.
struct alignas(64) PackedQ2_K { uint8_t q[8][2][line]; uint8_t s[16][16]; half d[16], m[16]; };                          // 2.625; groups in q as in Q6_K's h
struct alignas(64) PackedQ3_K { uint8_t q[8][2][line], h[8][line]; int8_t s[16][16]; half d[16]; uint8_t unused[32]; };  // 3.625
struct alignas(64) PackedQ4_K { uint8_t q[8][4][line]; uint8_t s[8][16], t[8][16]; half d[16], m[16]; };                 // 4.625
struct alignas(64) PackedQ5_K { uint8_t q[8][4][line], h[8][line]; uint8_t s[8][16], t[8][16]; half d[16], m[16]; };     // 5.625
struct alignas(64) PackedQ6_K { uint8_t q[8][4][line], h[8][2][line]; int8_t s[16][16]; half d[16]; uint8_t unused[32]; };  // 6.625
struct alignas(64) PackedIQ4_XS { uint8_t q[8][4][line]; int8_t s[8][16]; half d[16]; uint8_t unused[32]; };             // 4.375
static_assert(sizeof(PackedQ4_0) == 576 && sizeof(PackedQ4_1) == 320 && sizeof(PackedQ5_0) == 704, "");
static_assert(sizeof(PackedQ5_1) == 384 && sizeof(PackedQ8_0) == 1088 && sizeof(PackedQ4_K) == 2368, "");
static_assert(sizeof(PackedMXFP4) == 1088 && sizeof(PackedF16) == 1024 && sizeof(PackedBF16) == 1024, "");
static_assert(sizeof(PackedQ2_K) == 1344 && sizeof(PackedQ3_K) == 1856, "");
static_assert(sizeof(PackedQ5_K) == 2880 && sizeof(PackedQ6_K) == 3392 && sizeof(PackedIQ4_XS) == 2240, "");

// What activations are rounded to: as ggml rounds them for the same weights, but for F16 and F32, where they stay as they are.
enum Rounding : int {
  blocks_of_32 = 0,          // 8 bits, a scale in half precision per 32 (ggml's Q8_0)
  blocks_of_32_summed = 1,   // the same, and their sums times the scale in half precision (Q8_1)
  blocks_of_256 = 2,         // 8 bits, a scale in single precision per 256 (Q8_K)
  no_rounding = 3,           // single precision
  to_bfloats = 4,            // the upper half of single precision, ties to even
};

constexpr bool is_of_floats(Rounding rounding) { return rounding >= no_rounding; }

struct Format {
  Type type;
  int file_weights, file_bytes;      // of a block in the file
  int packed_weights, packed_bytes;  // of a block of a stripe
  Rounding rounding;
};

constexpr Format formats[] = {
    {type_q4_0, 32, sizeof(FileQ4_0), 64, sizeof(PackedQ4_0), blocks_of_32},
    {type_q4_1, 32, sizeof(FileQ4_1), 32, sizeof(PackedQ4_1), blocks_of_32_summed},
    {type_q5_0, 32, sizeof(FileQ5_0), 64, sizeof(PackedQ5_0), blocks_of_32},
    {type_q5_1, 32, sizeof(FileQ5_1), 32, sizeof(PackedQ5_1), blocks_of_32_summed},
    {type_q8_0, 32, sizeof(FileQ8_0), 64, sizeof(PackedQ8_0), blocks_of_32},
    {type_q2_k, 256, sizeof(FileQ2_K), 256, sizeof(PackedQ2_K), blocks_of_256},
    {type_q3_k, 256, sizeof(FileQ3_K), 256, sizeof(PackedQ3_K), blocks_of_256},
    {type_q4_k, 256, sizeof(FileQ4_K), 256, sizeof(PackedQ4_K), blocks_of_256},
    {type_q5_k, 256, sizeof(FileQ5_K), 256, sizeof(PackedQ5_K), blocks_of_256},
    {type_q6_k, 256, sizeof(FileQ6_K), 256, sizeof(PackedQ6_K), blocks_of_256},
    {type_iq4_nl, 32, sizeof(FileQ4_0), 64, sizeof(PackedQ4_0), blocks_of_32},
    {type_iq4_xs, 256, sizeof(FileIQ4_XS), 256, sizeof(PackedIQ4_XS), blocks_of_256},
    {type_mxfp4, 32, sizeof(FileMXFP4), 128, sizeof(PackedMXFP4), blocks_of_32},
    {type_f32, 32, sizeof(FileFloats), 32, sizeof(PackedF32), no_rounding},
    {type_f16, 32, sizeof(FileHalves), 32, sizeof(PackedF16), no_rounding},
    {type_bf16, 32, sizeof(FileHalves), 32, sizeof(PackedBF16), to_bfloats},
};

constexpr const Format* format_of(int type) {
  for (const Format& format : formats)
    if (format.type == type) return &format;
  return nullptr;
}

inline int64_t stripe_bytes(const Format& format, int64_t n_in) {
  return (n_in + format.packed_weights - 1) / format.packed_weights * format.packed_bytes;
}

}  // namespace puna
