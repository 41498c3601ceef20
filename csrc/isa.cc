#include "isa.h"

#include "encode.h"
#include "search.h"
#include "take.h"

namespace lowbit::LOWBIT_ISA {

#define LOWBIT_TEXT_OF(isa) #isa
#define LOWBIT_TEXT(isa) LOWBIT_TEXT_OF(isa)

extern const Kernels kernels = {
    LOWBIT_TEXT(LOWBIT_ISA),  //
    run_exact,                //
    run_fast,                 //
    take,                     //
    squares,                  //
    encode,                   //
    search,                   //
};

}  // namespace lowbit::LOWBIT_ISA
