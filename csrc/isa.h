// The drivers, compiled for the instruction set that the including file names in LOWBIT_ISA.

#include "encode.h"
#include "matmul_exact.h"
#include "matmul_fast.h"
#include "search.h"
#include "take.h"

namespace lowbit::LOWBIT_ISA {

#define LOWBIT_TEXT_OF(isa) #isa
#define LOWBIT_TEXT(isa) LOWBIT_TEXT_OF(isa)

extern const Kernels kernels = {
    LOWBIT_TEXT(LOWBIT_ISA),  //
    matmul_exact,             //
    matmul_fast,              //
    take,                     //
    squares,                  //
    encode,                   //
    search,                   //
};

}  // namespace lowbit::LOWBIT_ISA
