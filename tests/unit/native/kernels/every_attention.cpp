// Attention over caches of every kind with every instruction set of this processor, in blocks of memory of exactly the size they
// need, for a build with the compiler's sanitizers. Ends with 0 when they found nothing, all is near double precision, and what
// is infinite or no number changes no bit of the rows that do not see it.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

extern "C" {
const char* puna_instructions(int);
bool puna_use_instructions(const char*);
bool puna_can_attend(int);
void* puna_attention_new(int64_t, int64_t, int64_t, int64_t, int64_t, const int64_t*, bool, float, float, float, int64_t, int64_t);
int64_t puna_attention_floats(void*);
void puna_attention_free(void*);
void puna_attention_node(void*, int, int, void*);
}

// As ggml describes a tensor.
struct Tensor {
  int32_t type;
  void* buffer;
  int64_t ne[4];
  size_t nb[4];
  int32_t op, op_params[16], flags;
  Tensor* src[10];
  Tensor* view_src;
  size_t view_offs;
  void* data;
  char name[64];
  void* extra;
  char padding[8];
};

static uint32_t state = 1;
static uint32_t random_bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
static int64_t between(int64_t low, int64_t high) { return low + random_bits() % (high - low + 1); }
static float unit() { return static_cast<float>(random_bits()) / (1 << 23) - 1; }

template <class T> T* block(int64_t n) { return static_cast<T*>(malloc(static_cast<size_t>(n) * sizeof(T) + (n == 0))); }

// Halves of the size of one: few bits, so that they are exact.
static uint16_t some_half(double* value) {
  const uint32_t bits = random_bits();
  *value = std::ldexp(1.0 + static_cast<double>(bits & 1023) / 1024, static_cast<int>(bits >> 10 & 3) - 3) * (bits >> 12 & 1 ? -1 : 1);
  return static_cast<uint16_t>((bits >> 12 & 1) << 15 | ((bits >> 10 & 3) + 12) << 10 | (bits & 1023));
}

struct Cache {
  int type;
  int64_t bytes;  // of a cell
  uint8_t* data;
  std::vector<double> values;

  Cache(int type, int64_t width, int64_t n_cells) : type(type) {
    bytes = type == 0 ? 4 * width : type == 1 ? 2 * width : type == 8 ? width / 32 * 34 : width / 32 * 18;
    data = block<uint8_t>(bytes * n_cells);
    values.resize(static_cast<size_t>(width * n_cells));
    for (int64_t i = 0; i < width * n_cells; i++) {
      double& v = values[static_cast<size_t>(i)];
      if (type == 0) {
        const float f = unit();
        v = f;
        memcpy(data + 4 * i, &f, 4);
      } else if (type == 1) {
        const uint16_t h = some_half(&v);
        memcpy(data + 2 * i, &h, 2);
      } else if (i % 32 == 0) {
        double d;
        const uint16_t h = some_half(&d);
        uint8_t* at = data + i / 32 * (type == 8 ? 34 : 18);
        memcpy(at, &h, 2);
        for (int k = 0; k < (type == 8 ? 32 : 16); k++) {
          at[2 + k] = static_cast<uint8_t>(random_bits());
          if (type == 8) (&v)[k] = d * static_cast<int8_t>(at[2 + k]) / 1;
          else (&v)[k] = d * ((at[2 + k] & 15) - 8), (&v)[k + 16] = d * ((at[2 + k] >> 4) - 8);
        }
      }
    }
  }
  ~Cache() { free(data); }

  // One value of a cell, or a block's factor, is infinite or no number.
  void spoil(int64_t cell) {
    uint8_t* at = data + cell * bytes;
    const uint16_t halves[] = {0x7e00, 0x7c00, 0xfc00}, half = halves[random_bits() % 3];
    const float number = half == 0x7e00 ? NAN : half == 0x7c00 ? INFINITY : -INFINITY;
    if (type == 0) memcpy(at + bytes - 4, &number, 4);
    else memcpy(type == 1 ? at + bytes - 2 : at, &half, 2);
  }
};

static double largest_error() {
  const int types[] = {0, 1, 1, 8, 8, 2}, type = types[random_bits() % 6];
  const bool in_blocks = type == 8 || type == 2;
  const int64_t widths[] = {64, 64, 80, 96, 128, 256, 40, 72, 100, 7}, blocks[] = {32, 64, 64, 96, 128, 256, 160, 64, 32, 576};
  const int64_t key_width = in_blocks ? blocks[random_bits() % 10] : widths[random_bits() % 10];
  const bool in_keys = random_bits() % 5 == 0;
  const int64_t value_width = in_keys ? (in_blocks || key_width < 16 ? key_width : key_width - 8) : in_blocks ? blocks[random_bits() % 9] : widths[random_bits() % 10];
  const int64_t key_heads = between(1, 3), group = random_bits() % 8 ? between(1, 5) : between(60, 70), heads = key_heads * group;
  const int64_t n_ranges = between(1, 4);
  std::vector<int64_t> numbers;
  int64_t n = 0, n_cells = 0;
  std::vector<int64_t> begins;
  const int64_t key_bytes = Cache(type, key_width * key_heads, 0).bytes, value_bytes = in_keys ? key_bytes : Cache(type, value_width * key_heads, 0).bytes;
  for (int64_t i = 0; i < n_ranges; i++) {
    const int64_t rows = random_bits() % 3 ? between(1, 4) : between(1, group > 8 ? 4 : 90), sequences = between(1, 3), cells = between(1, random_bits() % 2 ? 70 : 700);
    const int64_t stride = between(0, cells + 9), begin = between(0, 50);
    begins.push_back(begin);
    const int64_t first = begins[0];
    numbers.insert(numbers.end(), {n, rows, sequences, cells, (begin - first) * key_bytes, stride * key_bytes, (begin - first) * value_bytes, stride * value_bytes});
    n += rows * sequences;
    const int64_t end = begin + stride * (sequences - 1) + cells;
    if (end > n_cells) n_cells = end;
  }
  Cache keys(type, key_width * key_heads, n_cells);
  Cache other(type, value_width * key_heads, in_keys ? 0 : n_cells);
  const Cache& values = in_keys ? keys : other;
  const int64_t held = in_keys ? key_width : value_width;
  const float softcap = random_bits() % 4 ? 0 : 3.0f, max_bias = random_bits() % 4 ? 0 : 4.0f, scale = 1 / std::sqrt(static_cast<float>(key_width)) / (in_blocks ? 500.0f : 1.0f);
  const bool has_sinks = random_bits() % 3 == 0;
  const int64_t key_turn = key_width % 64 == 0 && random_bits() % 2 ? 64 : 0, value_turn = value_width % 32 == 0 && random_bits() % 2 ? 32 : 0;

  Tensor query{}, key{}, value{}, sinks{}, node{};
  std::vector<Tensor> masks(static_cast<size_t>(n_ranges));
  float* q = block<float>(n * heads * key_width);
  for (int64_t i = 0; i < n * heads * key_width; i++) q[i] = unit();
  query.data = q, query.nb[0] = 4, query.nb[1] = static_cast<size_t>(4 * key_width), query.nb[2] = static_cast<size_t>(4 * key_width * heads);
  key.type = type, key.data = keys.data + begins[0] * key_bytes, key.nb[1] = static_cast<size_t>(key_bytes), key.nb[2] = static_cast<size_t>(key_bytes / key_heads);
  value.type = type, value.data = values.data + begins[0] * value_bytes, value.nb[1] = static_cast<size_t>(value_bytes), value.nb[2] = static_cast<size_t>(value_bytes / key_heads);
  std::vector<std::vector<double>> biases;
  for (int64_t i = 0; i < n_ranges; i++) {
    const int64_t* r = numbers.data() + 8 * i;
    const int64_t size = r[1] * r[2] * r[3];
    uint16_t* m = block<uint16_t>(size);
    std::vector<double> bias(static_cast<size_t>(size));
    const uint32_t kind = random_bits() % 4;  // all seen; some not; in stretches; a single one or none
    for (int64_t k = 0; k < size; k++) {
      const int64_t cell = k % r[3];
      const bool seen = kind == 0 || (kind == 1 && random_bits() % 3) || (kind == 2 && cell / 64 % 2 == 0) || (kind == 3 && cell == r[3] / 2 && k / r[3] % 2);
      m[k] = seen ? 0 : 0xfc00;
      bias[static_cast<size_t>(k)] = seen ? 0 : -INFINITY;
      if (seen && max_bias > 0) m[k] = 0xbc00, bias[static_cast<size_t>(k)] = -1;
    }
    biases.push_back(bias);
    Tensor& t = masks[static_cast<size_t>(i)];
    t.data = m, t.nb[0] = 2, t.nb[1] = static_cast<size_t>(2 * r[3]), t.nb[2] = t.nb[1] * static_cast<size_t>(r[1]), t.nb[3] = t.nb[2];
  }
  float* sink = block<float>(heads);
  for (int64_t h = 0; h < heads; h++) sink[h] = 2 * unit();
  sinks.data = sink;
  void* attention = puna_attention_new(heads, key_heads, key_width, value_width, n_ranges, numbers.data(), has_sinks, scale, softcap, max_bias, key_turn, value_turn);
  float* result = block<float>(puna_attention_floats(attention));
  node.data = result, node.src[0] = &query, node.src[1] = &key, node.src[2] = &value;
  for (int64_t i = 0; i < n_ranges; i++) node.src[3 + i] = &masks[static_cast<size_t>(i)];
  node.src[3 + n_ranges] = has_sinks ? &sinks : nullptr;

  // Rows times the Walsh-Hadamard matrix, so many values together.
  const auto turn = [](std::vector<double>& values, int64_t width) {
    for (int64_t apart = 1; apart < width; apart *= 2)
      for (size_t i = 0; i < values.size(); i++)
        if (!(static_cast<int64_t>(i) & apart)) {
          double &a = values[i], &b = values[i + static_cast<size_t>(apart)], sum = a + b;
          b = a - b, a = sum;
        }
    for (double& v : values) v /= width ? std::sqrt(static_cast<double>(width)) : 1;
  };
  std::vector<double> turned(q, q + n * heads * key_width);
  turn(turned, key_turn);
  std::vector<double> expected(static_cast<size_t>(n * heads * value_width));
  for (int64_t i = 0; i < n_ranges; i++) {
    const int64_t* r = numbers.data() + 8 * i;
    for (int64_t s = 0; s < r[2]; s++)
      for (int64_t t = 0; t < r[1]; t++)
        for (int64_t h = 0; h < heads; h++) {
          const int64_t row = r[0] + s * r[1] + t;
          int64_t power = 1;
          while (2 * power <= heads) power *= 2;
          const double slope = max_bias > 0 ? std::exp2(-max_bias / static_cast<double>(power) * (h < power ? static_cast<double>(h + 1) : static_cast<double>(h - power) + 0.5)) : 1;
          std::vector<double> scores(static_cast<size_t>(r[3]));
          double top = has_sinks ? sink[h] : -INFINITY, total = 0;
          for (int64_t c = 0; c < r[3]; c++) {
            const int64_t cell = begins[static_cast<size_t>(i)] + c + s * (r[5] / key_bytes);
            double score = 0;
            for (int64_t k = 0; k < key_width; k++)
              score += turned[static_cast<size_t>((row * heads + h) * key_width + k)] * keys.values[static_cast<size_t>((cell * key_heads + h / group) * key_width + k)];
            score *= scale;
            if (softcap > 0) score = softcap * std::tanh(score / softcap);
            score += slope * biases[static_cast<size_t>(i)][static_cast<size_t>((s * r[1] + t) * r[3] + c)];
            scores[static_cast<size_t>(c)] = score;
            top = std::fmax(top, score);
          }
          if (has_sinks) total = std::exp(sink[h] - top);
          double* to = expected.data() + (row * heads + h) * value_width;
          for (int64_t c = 0; c < r[3] && top > -INFINITY; c++) {
            const int64_t cell = begins[static_cast<size_t>(i)] + c + s * (r[5] / key_bytes);
            const double weight = std::exp(scores[static_cast<size_t>(c)] - top);
            total += weight;
            for (int64_t k = 0; k < value_width; k++) to[k] += weight * values.values[static_cast<size_t>((cell * key_heads + h / group) * held + k)];
          }
          for (int64_t k = 0; k < value_width; k++) to[k] = total > 0 ? to[k] / total : 0;
        }
  }
  turn(expected, value_turn);
  // Cells to be spoilt, of keys or of values, and rows that see none of them: of all heads together.
  std::vector<int64_t> spoilt;
  for (int64_t c = 0; c < n_cells; c++)
    if (random_bits() % 6 == 0) spoilt.push_back(c);
  std::vector<bool> is_sound(static_cast<size_t>(n), true);
  for (int64_t i = 0; i < n_ranges; i++) {
    const int64_t* r = numbers.data() + 8 * i;
    for (int64_t k = 0; k < r[1] * r[2]; k++)
      for (int64_t cell : spoilt) {
        const int64_t c = cell - begins[static_cast<size_t>(i)] - k / r[1] * (r[5] / key_bytes);
        if (c >= 0 && c < r[3] && biases[static_cast<size_t>(i)][static_cast<size_t>(k * r[3] + c)] > -INFINITY) is_sound[static_cast<size_t>(r[0] + k)] = false;
      }
  }
  const std::vector<uint8_t> of_keys(keys.data, keys.data + keys.bytes * n_cells), of_values(values.data, values.data + values.bytes * n_cells);
  double worst = 0, squares = 1e-12;
  std::vector<float> first(expected.size());
  for (double e : expected) squares += e * e;
  for (int i = 0; puna_instructions(i); i++) {
    if (!puna_use_instructions(puna_instructions(i))) continue;
    for (int n_threads = 1; n_threads <= 3; n_threads++)
      for (int again = 0; again < 2; again++) {
        for (int64_t k = 0; k < n * heads * value_width; k++) result[k] = NAN;
        std::vector<std::thread> threads;
        for (int t = 0; t < n_threads; t++) threads.emplace_back([&, t] { puna_attention_node(&node, t, n_threads, attention); });
        for (auto& thread : threads) thread.join();
        // However many threads there are, every bit is the same.
        if (n_threads == 1 && !again) memcpy(first.data(), result, first.size() * sizeof(float));
        if (memcmp(first.data(), result, first.size() * sizeof(float))) printf("%s: %d threads differ from one\n", puna_instructions(i), n_threads), worst = INFINITY;
        double difference = 0;
        for (size_t k = 0; k < expected.size(); k++) difference += (result[k] - expected[k]) * (result[k] - expected[k]);
        const double error = std::sqrt(difference / squares);
        if (!(error < 1e-5)) printf("%s, %d threads: %g; type %d, widths %ld %ld, heads %ld/%ld, %ld ranges, cap %g, bias %g\n", puna_instructions(i), n_threads, error, type, key_width, value_width, heads, key_heads, n_ranges, static_cast<double>(softcap), static_cast<double>(max_bias));
        worst = std::fmax(worst, error == error ? error : INFINITY);
      }
    for (int64_t cell : spoilt) random_bits() % 2 ? keys.spoil(cell) : (in_keys ? keys : other).spoil(cell);
    puna_attention_node(&node, 0, 1, attention);
    memcpy(keys.data, of_keys.data(), of_keys.size()), memcpy(values.data, of_values.data(), of_values.size());
    const int64_t row = heads * value_width;
    for (int64_t k = 0; k < n; k++)
      if (is_sound[static_cast<size_t>(k)] && memcmp(first.data() + k * row, result + k * row, static_cast<size_t>(row) * sizeof(float))) {
        printf("%s: a row is changed by cells that it does not see; type %d, widths %ld %ld\n", puna_instructions(i), type, key_width, value_width);
        worst = INFINITY;
        break;
      }
  }
  puna_attention_free(attention);
  free(q), free(sink), free(result);
  for (Tensor& t : masks) free(t.data);
  return worst;
}

int main(int argc, char** argv) {
  double worst = 0;
  for (int i = 0; puna_instructions(i); i++)
    if (puna_use_instructions(puna_instructions(i))) printf("%s ", puna_instructions(i));
  for (int i = 0; i < (argc > 1 ? atoi(argv[1]) : 20); i++) worst = std::fmax(worst, largest_error());
  printf("%.3g\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
