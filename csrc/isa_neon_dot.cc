#define LOWBIT_ISA neon_dot
#define LOWBIT_NEON
#define LOWBIT_NEON_DOT
#include "isa.h"
