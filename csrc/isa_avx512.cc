#define LOWBIT_ISA avx512
#define LOWBIT_AVX512
#include "isa.h"
