// The subset of Metal that the kernels use, in CUDA: a warp replaces a simdgroup, both of 32 lanes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef unsigned int uint;
typedef unsigned short ushort;
typedef __nv_bfloat16 bfloat16_t;
typedef __half float16_t;
typedef __half half;
typedef int int32_t;
typedef unsigned int uint32_t;

struct Pair {
  float x, y;
  Pair() = default;
  __device__ Pair(float a, float b) : x(a), y(b) {}
  __device__ float& operator[](int i) { return i ? y : x; }
  __device__ const float& operator[](int i) const { return i ? y : x; }
};
#define float2 Pair

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline float simd_sum(float x) {
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <class T> __device__ inline T simd_max(T x) {
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_xor_sync(~0u, x, step);
    x = x < other ? other : x;
  }
  return x;
}
template <class T> __device__ inline T simd_min(T x) {
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_xor_sync(~0u, x, step);
    x = other < x ? other : x;
  }
  return x;
}
__device__ inline bool simd_any(bool x) { return __any_sync(~0u, x); }
__device__ inline float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(~0u, x, mask); }

struct simdgroup_float8x8 {
  Pair elements;
  __device__ Pair& thread_elements() { return elements; }
};
// Each lane fetches the row of the left and the column of the right matrix that its elements need.
__device__ inline void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_float8x8& a, const simdgroup_float8x8& b, const simdgroup_float8x8& c) {
  const uint lane = threadIdx.x % 32;
  const uint row = (lane / 16) * 4 + (lane / 2) % 4;
  const uint column = ((lane / 8) % 2) * 4 + (lane % 2) * 2;
  Pair sum = c.elements;
  for (uint i = 0; i < 8; i++) {
    const uint left = (row / 4) * 16 + (i / 4) * 8 + (row % 4) * 2 + (i % 4) / 2;
    const uint right = (i / 4) * 16 + (column / 4) * 8 + (i % 4) * 2 + (column % 4) / 2;
    const float x = __shfl_sync(~0u, a.elements.x, left), y = __shfl_sync(~0u, a.elements.y, left);
    const float one = i % 2 ? y : x;
    sum.x += one * __shfl_sync(~0u, b.elements.x, right);
    sum.y += one * __shfl_sync(~0u, b.elements.y, right);
  }
  d.elements = sum;
}
