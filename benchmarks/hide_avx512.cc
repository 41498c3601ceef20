// Answers the breakpoints that avx2.py puts in the place of CPUID instructions: with what the processor has, without
// AVX-512, AVX-VNNI and AMX, and with the family and model of a Zen 3.
#include <cpuid.h>
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

#include <initializer_list>

namespace {

constexpr uint32_t bits(std::initializer_list<int> places) {
  uint32_t all = 0;
  for (int place : places) all |= uint32_t{1} << place;
  return all;
}

void answer(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto leaf = static_cast<uint32_t>(registers[REG_RAX]), part = static_cast<uint32_t>(registers[REG_RCX]);
  uint32_t a, b, c, d;
  __cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 1 || leaf == 0x80000001) a = 0x00a00f11;
  if (leaf == 7 && part == 0) {
    b &= ~bits({16, 17, 21, 26, 27, 28, 30, 31});
    c &= ~bits({1, 6, 11, 12, 14});
    d &= ~bits({2, 3, 8, 22, 23, 24, 25});
  }
  if (leaf == 7 && part > 0) a = b = c = d = 0;
  registers[REG_RAX] = a;
  registers[REG_RBX] = b;
  registers[REG_RCX] = c;
  registers[REG_RDX] = d;
}

__attribute__((constructor)) void start() {
  struct sigaction action = {};
  action.sa_sigaction = answer;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
  sigaction(SIGTRAP, &action, nullptr);
}

}  // namespace
