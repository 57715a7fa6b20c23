// Whether a processor computes with an instruction set what it should.
#pragma once
#include "instructions.h"

namespace puna {

// Small products of every format beside those of the portable instructions, computed in a process of their own: an
// instruction that the processor does not have ends that one. True where all agree.
bool computes_rightly(const Instructions& tried);

}  // namespace puna
