#define LOWBIT_ISA avx512
#include "isa.h"
