// The functions called by the compiler's array and integer checks, so that no library is needed.
#pragma once
#include "lanes.h"

namespace emu {
struct Place {
  const char* file;
  uint32_t line, column;
};
}  // namespace emu

#define EMU_CHECK(name, said, ...) \
  extern "C" void __ubsan_handle_##name(emu::Place* at, ##__VA_ARGS__) { emu::fail(said, int(at->line)); }
EMU_CHECK(out_of_bounds, "index outside an array of the lane", void*)
EMU_CHECK(add_overflow, "sum that overflows a signed integer", void*, void*)
EMU_CHECK(sub_overflow, "difference that overflows a signed integer", void*, void*)
EMU_CHECK(mul_overflow, "product that overflows a signed integer", void*, void*)
EMU_CHECK(negate_overflow, "negation that overflows a signed integer", void*)
EMU_CHECK(divrem_overflow, "division by zero, or that overflows", void*, void*)
EMU_CHECK(shift_out_of_bounds, "shift by more than the integer's bits", void*, void*)
