// Compiled once per instruction set, with the compiler's options for it and PUNA_INSTRUCTIONS as the name.
#if defined(__AVX512F__)
#include "attention_lanes_avx512.h"
#elif defined(__AVX2__)
#include "attention_lanes_avx2.h"
#elif defined(PUNA_NEON)
#include "attention_lanes_neon.h"
#else
#include "attention_lanes_portable.h"
#endif
#include "attention_kernel.h"

#define PUNA_JOINED_OF(a, b) a##b
#define PUNA_JOINED(a, b) PUNA_JOINED_OF(a, b)

namespace puna {

static_assert(Floats::few_rows <= 8, "puna_attention_floats counts on it");
extern const AttentionInstructions PUNA_JOINED(PUNA_INSTRUCTIONS, _attention) = {Floats::few_rows, attend<Floats>, merge<Floats>, turn_values};

}  // namespace puna
