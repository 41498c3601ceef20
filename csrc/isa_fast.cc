#include "isa.h"
#include "matmul_fast.h"

namespace lowbit::LOWBIT_ISA {

bool run_fast(const Matmul& p, const Parallel& parallel) { return matmul_fast(p, parallel); }

}  // namespace lowbit::LOWBIT_ISA
