#include "isa.h"

namespace lowbit::LOWBIT_ISA {

#define LOWBIT_TEXT_OF(isa) #isa
#define LOWBIT_TEXT(isa) LOWBIT_TEXT_OF(isa)

// The kernels of NEON, except for products with int8 activations.
extern const Kernels kernels = {
    LOWBIT_TEXT(LOWBIT_ISA),  //
    neon::kernels.matmul,     //
    run_fast,                 //
    neon::kernels.take,       //
    neon::kernels.squares,    //
    neon::kernels.encode,     //
    neon::kernels.search,     //
};

}  // namespace lowbit::LOWBIT_ISA
