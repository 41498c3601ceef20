#define LOWBIT_ISA avx2
#define LOWBIT_AVX2
#include "isa.h"
