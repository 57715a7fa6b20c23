// Every format in emulated tiles, in blocks of memory of exactly the size they need: the same bits as in registers, close to the
// portable instructions, and for each token what it gets alone. Then what the check before the first use says of tiles that are right,
// that are wrong, and that end the process.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "instructions.h"
#include "packing.h"
#include "self_check.h"

namespace puna {
int emulated_fault = 0;
// Attention has no tiles.
extern const AttentionInstructions portable_attention{}, avx512_attention{};
}  // namespace puna

using namespace puna;

static uint32_t state = 1;
static uint32_t random_bits() { return state = state * 1664525u + 1013904223u; }

template <class Value> static Value* block(int64_t n) {
  void* memory = nullptr;
  if (posix_memalign(&memory, line, static_cast<size_t>(n) * sizeof(Value))) abort();
  memset(memory, 0, static_cast<size_t>(n) * sizeof(Value));
  return static_cast<Value*>(memory);
}

static void computed(const Instructions& with, const Format& format, const Activations& a, const float* x, Work work, float* y) {
  for (int64_t t = 0; t < a.n; t++) with.round(format.rounding, x + t * a.n_in, a, t, 0, a.n_in);
  work.y = y;
  with.multiply(format, a, work);
}

static int wrong = 0;
static double worst = 0;

static void check(const Format& format, int64_t n_in, int64_t n_rows, int64_t n, bool scattered) {
  const int64_t n_stripes = (n_rows + rows_of_stripe - 1) / rows_of_stripe, file_bytes = n_in / format.file_weights * format.file_bytes * n_rows;
  uint8_t *rows = block<uint8_t>(file_bytes), *packed = block<uint8_t>(n_stripes * stripe_bytes(format, n_in));
  for (int64_t i = 0; i < file_bytes; i++) rows[i] = random_bits() >> 24 & 0xbf;  // no number made of them is infinite
  pack(format, rows, n_in, 0, n_rows, packed);
  float *x = block<float>(n * n_in), *y[4];
  for (int64_t i = 0; i < n * n_in; i++) x[i] = static_cast<float>(static_cast<int32_t>(random_bits())) / 2147483648.0f * (i % 61 ? 1 : 6);
  uint8_t* rounded = block<uint8_t>(Activations::bytes(format.rounding, n_in, n));
  const Activations a(format.rounding, n_in, n, rounded);
  for (float*& values : y) values = block<float>(n * n_rows);
  int32_t* columns = block<int32_t>(n);
  for (int64_t t = 0; t < n; t++) columns[t] = static_cast<int32_t>(n - 1 - t);
  const Work work{packed, n_rows, 0, n_stripes, 0, n, nullptr, n_rows, scattered ? columns : nullptr};
  computed(portable_instructions, format, a, x, work, y[0]);
  computed(avx512_bf16_instructions, format, a, x, work, y[1]);
  computed(amx_instructions, format, a, x, work, y[2]);
  for (int64_t t = 0; t < n; t++) {
    Work alone = work;
    alone.first = t;
    alone.n = 1;
    alone.y = y[3];
    amx_instructions.multiply(format, a, alone);
  }
  const size_t bytes = static_cast<size_t>(n * n_rows) * sizeof(float);
  const bool is_exact = format.type == type_bf16 || !memcmp(y[1], y[2], bytes);
  double apart = 0, all = 0;
  for (int64_t i = 0; i < n * n_rows; i++) {
    apart += std::pow(static_cast<double>(y[2][i]) - static_cast<double>(y[0][i]), 2);
    all += std::pow(static_cast<double>(y[0][i]), 2);
  }
  worst = std::fmax(worst, std::sqrt(apart / std::fmax(all, 1e-30)));
  if (!is_exact || memcmp(y[2], y[3], bytes)) {
    printf("type %d, %d x %d, %d tokens: %s\n", format.type, static_cast<int>(n_in), static_cast<int>(n_rows), static_cast<int>(n),
           is_exact ? "a token alone differs" : "other bits than in registers");
    wrong++;
  }
  free(rows), free(packed), free(x), free(rounded), free(columns);
  for (float* values : y) free(values);
}

int main() {
  for (const Format& format : formats)
    for (int64_t n_blocks : {1, 3})
      for (int64_t n_rows : {1, 16, 17, 41})
        for (int64_t n : {1, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64}) check(format, n_blocks * format.file_weights, n_rows, n, n % 2);
  printf("%.3g\n", worst);
  for (emulated_fault = 0; emulated_fault < 3; emulated_fault++) printf("%d\n", computes_rightly(amx_instructions));
  return wrong || worst > 1e-5;
}
