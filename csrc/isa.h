// The drivers of one instruction set, LOWBIT_ISA. They are compiled in several units, so that several cores share
// the work; each unit defines some of these functions.
#ifndef LOWBIT_ISA_H_
#define LOWBIT_ISA_H_

#include "kernels.h"

namespace lowbit::LOWBIT_ISA {

bool run_exact(const Matmul&, const Parallel&);
bool run_fast(const Matmul&, const Parallel&);

}  // namespace lowbit::LOWBIT_ISA

#endif  // LOWBIT_ISA_H_
