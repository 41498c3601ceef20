// simd.h for NEON, which every 64-bit ARM has.
#ifndef LOWBIT_SIMD_NEON_H_
#define LOWBIT_SIMD_NEON_H_

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace lowbit::LOWBIT_ISA {

using F = float __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kTileVectors = 4;  // of the register tile: 6 x 4 sums, 4 vectors, 1 broadcast in 32 registers
constexpr int kRegisters = 32;
constexpr int kStreamRows = 4;
constexpr int kDirectRows = 0;
constexpr int kDotRows = 4, kDotMost = 4;
constexpr bool kLooksUp16 = false;
constexpr bool kAddsBesideFma = false;

LOWBIT_INLINE F zero() { return F{}; }
LOWBIT_INLINE F broadcast(float a) { return F{a, a, a, a}; }
LOWBIT_INLINE F load(const float* p) { return vld1q_f32(p); }
LOWBIT_INLINE void store(float* p, F a) { vst1q_f32(p, a); }
LOWBIT_INLINE F load(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  F a{};
  if (count > 0) a[0] = p[0];
  if (count > 1) a[1] = p[1];
  if (count > 2) a[2] = p[2];
  return a;
}
LOWBIT_INLINE void store(float* p, F a, int64_t count) {
  if (count >= kLanes) return store(p, a);
  if (count > 0) p[0] = a[0];
  if (count > 1) p[1] = a[1];
  if (count > 2) p[2] = a[2];
}
LOWBIT_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
LOWBIT_INLINE F square_root(F a) { return vsqrtq_f32(a); }
// The second operand if one is NaN, as on x86; the instructions of NEON return NaN.
LOWBIT_INLINE F smaller(F a, F b) { return a < b ? a : b; }
LOWBIT_INLINE F larger(F a, F b) { return a > b ? a : b; }
LOWBIT_INLINE float sum_of(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }

LOWBIT_INLINE F load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
LOWBIT_INLINE void store_f16(uint16_t* p, F a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_SIMD_NEON_H_
