#define LOWBIT_ISA neon
#define LOWBIT_NEON
#include "isa.h"
