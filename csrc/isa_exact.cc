#include "isa.h"
#include "matmul_exact.h"

namespace lowbit::LOWBIT_ISA {

bool run_exact(const Matmul& p, const Parallel& parallel) { return matmul_exact(p, parallel); }

}  // namespace lowbit::LOWBIT_ISA
