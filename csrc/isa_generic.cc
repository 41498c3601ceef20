#define LOWBIT_ISA generic
#include "isa.h"
