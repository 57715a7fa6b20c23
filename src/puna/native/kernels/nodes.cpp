// What the library offers: packing, and nodes that ggml's threads compute inside its graphs.
#include <cstddef>
#include <cstring>

#include "activations.h"
#include "packing.h"
#include "parts.h"
#include "self_check.h"

namespace puna {

const Instructions* chosen = &portable_instructions;

namespace {

constexpr const Instructions* known[] = {PUNA_KNOWN};  // what the compiler knew, the best first

// Of two instruction sets: products of weights and activations that are rounded to bytes by *fast*, and what has other bits with
// another set by *settled*.
struct Both {
  const Instructions *settled, *fast;
  Instructions together;
};
Both both;

void round_by_either(Rounding how, const float* x, const Activations& a, int64_t t, int64_t begin, int64_t end) {
  (how == to_bfloats ? both.settled : both.fast)->round(how, x, a, t, begin, end);
}

void multiply_by_either(const Format& format, const Activations& a, const Work& work) {
  (format.rounding == to_bfloats ? both.settled : both.fast)->multiply(format, a, work);
}

const Instructions* of_name(const char* name) {
  for (const Instructions* one : known)
    if (!strcmp(one->name, name)) return one->available() ? one : nullptr;
  return nullptr;
}

struct Matrix {
  const Format* format;
  int64_t n_in, n_rows;
  Shares shares;
};

void multiply_node(Matrix& m, const Activations& a, const uint8_t* weights, float* y, int thread, int n_threads) {
  const Chunks chunks(m.format->rounding, m.n_in, a.n);
  const int64_t n_stripes = stripes_of(m.n_rows), pairs = (n_stripes + 1) / 2;
  const int64_t per_chunk = n_threads == 1 ? 1 : smaller(pairs, n_threads * pieces_of_thread);
  m.shares.each(static_cast<int>(per_chunk * chunks.n), thread, n_threads, [&](int i) {
    const int64_t piece = i % per_chunk, first = i / per_chunk * chunks.size, end = smaller(first + chunks.size, a.n);
    const int64_t begin = pairs * piece / per_chunk * 2, stop = smaller(pairs * (piece + 1) / per_chunk * 2, n_stripes);
    multiply_chunk(*m.format, a, Work{weights, m.n_rows, begin, stop, first, end - first, y, m.n_rows}, chunks.tile);
  });
}

}  // namespace
}  // namespace puna

using namespace puna;

PUNA_EXPORT int puna_kernels_version() { return 11; }

// Offsets of type, ne, nb, src and data, and the size.
PUNA_EXPORT void puna_tensor_layout(int64_t* offsets) {
  const int64_t found[] = {offsetof(Tensor, type), offsetof(Tensor, ne),   offsetof(Tensor, nb),
                           offsetof(Tensor, src),  offsetof(Tensor, data), sizeof(Tensor)};
  memcpy(offsets, found, sizeof(found));
}

// Name i of the instruction sets, the best first, whether or not this processor has it; null after the last.
PUNA_EXPORT const char* puna_instructions(int i) {
  return i >= 0 && i < static_cast<int>(sizeof(known) / sizeof(*known)) ? known[i]->name : nullptr;
}

PUNA_EXPORT bool puna_has_instructions(const char* name) { return of_name(name) != nullptr; }

// Whether they compute what the portable ones do; false where this processor has none of that name.
PUNA_EXPORT bool puna_check_instructions(const char* name) {
  const Instructions* found = of_name(name);
  return found && computes_rightly(*found);
}

// Compute with these from now on; false where this processor has none of that name.
PUNA_EXPORT bool puna_use_instructions(const char* name) {
  const Instructions* found = of_name(name);
  if (found) chosen = found;
  return found != nullptr;
}

// Compute with the first what has the same bits with both, and with the second all else.
PUNA_EXPORT bool puna_use_both(const char* fast, const char* settled) {
  both.fast = of_name(fast), both.settled = of_name(settled);
  if (!both.fast || !both.settled) return false;
  both.together = *both.fast;
  both.together.round = round_by_either;
  both.together.multiply = multiply_by_either;
  both.together.attention = both.settled->attention;
  chosen = &both.together;
  return true;
}

// Bytes of a packed matrix, a multiple of 64; 0 for types and shapes that are not packed. Rows of floats may have any length.
PUNA_EXPORT int64_t puna_packed_bytes(int type, int64_t n_in, int64_t n_rows) {
  const Format* format = format_of(type);
  if (!format || n_in <= 0 || n_rows <= 0 || (n_in % format->file_weights && !is_of_floats(format->rounding))) return 0;
  return (n_rows + rows_of_stripe - 1) / rows_of_stripe * stripe_bytes(*format, n_in);
}

PUNA_EXPORT void puna_pack(int type, const void* rows, int64_t n_in, int64_t first, int64_t n_rows, void* packed) {
  pack(*format_of(type), static_cast<const uint8_t*>(rows), n_in, first, n_rows, static_cast<uint8_t*>(packed));
}

PUNA_EXPORT int puna_rounding(int type) { return format_of(type)->rounding; }

PUNA_EXPORT int64_t puna_rounded_bytes(int rounding, int64_t n_in, int64_t n) {
  return Activations::bytes(static_cast<Rounding>(rounding), n_in, n);
}

PUNA_EXPORT void* puna_matrix_new(int type, int64_t n_in, int64_t n_rows) {
  Matrix* matrix = new Matrix;
  matrix->format = format_of(type);
  matrix->n_in = n_in;
  matrix->n_rows = n_rows;
  return matrix;
}

PUNA_EXPORT void puna_matrix_free(void* matrix) { delete static_cast<Matrix*>(matrix); }

// Node: x F32 [n_in, n...] rounded; user data is the Rounding.
PUNA_EXPORT void puna_round_node(void* node, int thread, int n_threads, void* rounding) {
  const Tensor *to = static_cast<Tensor*>(node), *x = to->src[0];
  const Rounding how = static_cast<Rounding>(reinterpret_cast<intptr_t>(rounding));
  const int64_t n = n_columns(x), n_in = x->ne[0], block = how == blocks_of_256 ? 256 : 32, blocks = (n_in + block - 1) / block;
  const Activations a(how, n_in, n, to->data);
  // By tokens where there are enough of them, else by blocks.
  if (n >= n_threads) {
    for (int64_t t = n * thread / n_threads; t < n * (thread + 1) / n_threads; t++) chosen->round(how, column(x, t), a, t, 0, n_in);
  } else {
    const int64_t begin = blocks * thread / n_threads * block, end = smaller(blocks * (thread + 1) / n_threads * block, n_in);
    for (int64_t t = 0; t < n; t++) chosen->round(how, column(x, t), a, t, begin, end);
  }
}

// Node: rows I32 [n] of packed weights, F32 [n_in, n].
PUNA_EXPORT void puna_rows_node(void* node, int thread, int n_threads, void* matrix) {
  const Tensor* to = static_cast<Tensor*>(node);
  const Matrix& m = *static_cast<Matrix*>(matrix);
  const int32_t* rows = static_cast<const int32_t*>(to->src[0]->data);
  for (int64_t i = thread; i < n_columns(to); i += n_threads) {
    if (rows[i] < 0 || rows[i] >= m.n_rows) abort();  // as ggml does
    unpack_row(*m.format, static_cast<const uint8_t*>(to->src[1]->data), m.n_in, rows[i], static_cast<float*>(to->data) + i * m.n_in);
  }
}

// The same outside of graphs, for tests and measurements: y [n][n_rows] from x [n][n_in], with one thread.
PUNA_EXPORT void puna_round(int type, const float* x, int64_t n_in, int64_t n, void* rounded) {
  const Rounding how = format_of(type)->rounding;
  const Activations a(how, n_in, n, rounded);
  for (int64_t t = 0; t < n; t++) chosen->round(how, x + t * n_in, a, t, 0, n_in);
}

PUNA_EXPORT void puna_multiply(void* matrix, const void* packed, const void* rounded, int64_t n, float* y) {
  Matrix& m = *static_cast<Matrix*>(matrix);
  const Activations a(m.format->rounding, m.n_in, n, const_cast<void*>(rounded));
  multiply_node(m, a, static_cast<const uint8_t*>(packed), y, 0, 1);
}

PUNA_EXPORT void puna_unpack(int type, const void* packed, int64_t n_in, int64_t row, float* values) {
  unpack_row(*format_of(type), static_cast<const uint8_t*>(packed), n_in, row, values);
}

// For measurements of the machine: multiply-adds without memory, and reading with almost no arithmetic: one word of every
// line, which memory gives as a whole.
PUNA_EXPORT int64_t puna_exercise(int64_t times) { return chosen->exercise(times); }

PUNA_EXPORT uint64_t puna_read(const void* bytes, int64_t n) {
  constexpr int64_t step = line / 8, ahead = 80 * step;
  const uint64_t* words = static_cast<const uint64_t*>(bytes);
  uint64_t sums[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i + 4 * step <= n / 8; i += 4 * step)
    for (int k = 0; k < 4; k++) {
      __builtin_prefetch(words + i + k * step + ahead);
      sums[k] += words[i + k * step];
    }
  return sums[0] + sums[1] + sums[2] + sums[3];
}
