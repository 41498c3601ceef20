// The kernels for this machine: the best instruction set that it has, or the one that LOWBIT_ISA names.
#ifndef LOWBIT_CHOOSE_H_
#define LOWBIT_CHOOSE_H_

#include <array>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels.h"

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace lowbit {

struct InstructionSet {
  const char* name;
  bool is_here;
  const Kernels* kernels;
};

#if defined(__aarch64__)

#if defined(__APPLE__)
inline bool has_feature(const char* name) {
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname(name, &has, &size, nullptr, 0) == 0 && has != 0;
}
inline bool has_dot_products() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
inline bool has_matrix_products() { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
// HWCAP_ASIMDDP and HWCAP2_I8MM, which old headers lack.
inline bool has_dot_products() { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; }
inline bool has_matrix_products() { return (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }
#endif

// From the best to the one that always runs.
inline auto instruction_sets() {
  return std::array{
      InstructionSet{"neon_i8mm", has_dot_products() && has_matrix_products(), &neon_i8mm::kernels},
      InstructionSet{"neon_dot", has_dot_products(), &neon_dot::kernels},
      InstructionSet{"neon", true, &neon::kernels},
      InstructionSet{"generic", true, &generic::kernels},
  };
}

#else

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline bool has_avx512() {
#if defined(LOWBIT_EMULATE_AVX512)
  return has_avx2();
#endif
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
}

// From the best to the one that always runs.
inline auto instruction_sets() {
  return std::array{
      InstructionSet{"avx512", has_avx512(), &avx512::kernels},
      InstructionSet{"avx2", has_avx2(), &avx2::kernels},
      InstructionSet{"generic", true, &generic::kernels},
  };
}

#endif

struct Choice {
  const Kernels* kernels;  // null if none can run, for the reason in `error`
  std::string error;
};

inline Choice choose_kernels() {
  const char* forced = std::getenv("LOWBIT_ISA");
  const std::string_view asked = forced == nullptr ? "" : forced;
  std::string names;
  for (const InstructionSet& isa : instruction_sets()) {
    if (isa.is_here && (asked.empty() || asked == isa.name)) return {isa.kernels, ""};
    if (asked == isa.name) {
      return {nullptr, "LOWBIT_ISA=" + std::string(asked) + ": this machine lacks some of its instructions."};
    }
    names += (names.empty() ? "" : ", ") + std::string(isa.name);
  }
  return {nullptr, "LOWBIT_ISA=" + std::string(asked) + " must be one of " + names + "."};
}

inline const Choice& choice() {
  static const Choice chosen = choose_kernels();
  return chosen;
}

}  // namespace lowbit

#endif  // LOWBIT_CHOOSE_H_
