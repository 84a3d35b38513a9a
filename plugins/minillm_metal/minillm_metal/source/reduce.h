// Below all values compared here; finite, so that fast math cannot drop it.
#include <metal_simdgroup>
constant constexpr float LOWEST = -3.0e38f;

// Sums and maxima over a threadgroup of whole simdgroups, 32 of them at most. `shared` has one number
// for each, and may be used again after the call.
struct Lanes {
  uint lane, simdgroup, simdgroups;  // in its simdgroup; which one; how many
};

inline float sum_of_all(float x, Lanes at, threadgroup float* shared) {
  x = simd_sum(x);
  if (at.lane == 0) shared[at.simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x = simd_sum(at.lane < at.simdgroups ? float(shared[at.lane]) : 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x;
}

inline float max_of_all(float x, Lanes at, threadgroup float* shared) {
  x = simd_max(x);
  if (at.lane == 0) shared[at.simdgroup] = x;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x = simd_max(at.lane < at.simdgroups ? float(shared[at.lane]) : LOWEST);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return x;
}
