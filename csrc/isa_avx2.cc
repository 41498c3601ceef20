#define LOWBIT_ISA avx2
#include "isa.h"
