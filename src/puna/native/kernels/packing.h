// From rows of a file to stripes, and back to the values of one row. Plain code; bound by memory.
#pragma once
#include "formats.h"

namespace puna {

// Rows as the file has them, to the places first .. first + n_rows of a packed matrix. Rows of one stripe may come in
// several calls, but not at the same time. What a stripe has beyond the last row may be anything: nothing is written of it.
void pack(const Format&, const uint8_t* rows, int64_t n_in, int64_t first, int64_t n_rows, uint8_t* packed);

void unpack_row(const Format&, const uint8_t* packed, int64_t n_in, int64_t row, float* values);

}  // namespace puna
