"""Layouts of other projects' files, which are read and run as they are stored and not quantized to.

The names are those of the projects, in lower case. Offsets and group scales are components of the arrays that are read.
"""

from .layout import Layout
from .levels import Floats, Integers, Powers, Table

E8M0 = Powers(8)
E4M3 = Floats(8, exponent=4, mantissa=3, reserved=1)
E5M2 = Floats(8, exponent=5, mantissa=2, reserved=4)
E2M1 = Floats(4, exponent=2, mantissa=1)
_IQ4 = Table(4, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
# FP4 of bitsandbytes has two codes for 0, which are one here; no code has the last level.
_FP4 = (1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1)
_FP4_BNB = Table(4, (*(-level for level in reversed(_FP4)), 0, *_FP4, 2))
_SUPER = 256  # elements of a superblock of llama.cpp, which share a group scale

FILE_LAYOUTS = {
    "q2_k": Layout(Integers(2), 16, Integers(4), _SUPER),
    "q3_k": Layout(Integers(3, 4), 16, Integers(6, 32), _SUPER),
    "q4_k": Layout(Integers(4), 32, Integers(6), _SUPER),
    "q5_k": Layout(Integers(5), 32, Integers(6), _SUPER),
    "q6_k": Layout(Integers(6, 32), 16, Integers(8, 128), _SUPER),
    "iq4_nl": Layout(_IQ4, 32),
    "iq4_xs": Layout(_IQ4, 32, Integers(6, 32), _SUPER),
    "nvfp4_gguf": Layout(E2M1, 16, E4M3),  # without a scale of the matrix
    "nvfp4_divided": Layout(E2M1, 16, E4M3, "matrix", group_divides=True),  # compressed-tensors
    "uint8": Layout(Integers(8), 128),
    "fp4_bnb": Layout(_FP4_BNB, 64),
}
"""The layouts by name."""
