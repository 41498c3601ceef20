"""What a code means before scaling: integers, a table, or a small float.

`decode` gives the float32 levels of codes, `nearest` the codes of the levels nearest to float32 values. Both are plain
jnp without gathers, so that kernels can call `decode` on their tiles.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Levels:
    """The levels of codes with this number of bits."""

    bits: int

    def decode(self, codes: jax.Array) -> jax.Array:
        """The levels of codes, as float32."""
        raise NotImplementedError

    def nearest(self, values: jax.Array) -> jax.Array:
        """The uint8 codes of the levels nearest to float32 values; those beyond the range are clipped."""
        raise NotImplementedError

    # Without JAX: formats are declared when the package is imported, before a backend may be chosen, and a mesh around
    # may be of devices that are not here.
    @functools.cached_property
    def table(self) -> np.ndarray:
        """The level of each code, as float32."""
        raise NotImplementedError

    @property
    def largest(self) -> float:
        """The largest magnitude of a level."""
        return float(np.nanmax(np.abs(self.table)))

    @property
    def nan_code(self) -> int | None:
        """A code that means NaN; None if there is none."""
        return None

    @property
    def is_signed(self) -> bool:
        """Whether a level is negative."""
        return bool((self.table < 0).any())

    @property
    def int8_multiplier(self) -> int | None:
        """The multiplier that maps levels to int8 without rounding; None if they do not fit."""
        fits = np.isfinite(self.table).all() and self.largest <= 127 and (self.table == np.rint(self.table)).all()
        return 1 if fits else None


@dataclasses.dataclass(frozen=True)
class Integers(Levels):
    """Integers: `level = code - zero`."""

    zero: int = 0

    def decode(self, codes: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32) - self.zero

    def nearest(self, values: jax.Array) -> jax.Array:
        codes = jnp.clip(jnp.round(values) + self.zero, 0, 2**self.bits - 1)
        return jnp.nan_to_num(codes).astype(jnp.uint8)

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.arange(2**self.bits, dtype=np.float32) - self.zero


@dataclasses.dataclass(frozen=True)
class Table(Levels):
    """A table: `level = values[code]`, in ascending order.

    A value halfway between two levels takes the upper one.
    """

    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.values)
        if count != 2**self.bits:
            raise ValueError(f"A table of {self.bits}-bit codes has {2**self.bits} levels, not {count}.")
        for i, (low, high) in enumerate(zip(self.values, self.values[1:], strict=False)):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(
                    f"Levels must be finite and in ascending order: level {i} is {low} and level {i + 1} is {high}."
                )

    def decode(self, codes: jax.Array) -> jax.Array:
        return chosen(codes, self.values)

    @property
    def middle(self) -> np.ndarray:
        """Where the nearest level changes."""
        return np.array([(low + high) / 2 for low, high in zip(self.values, self.values[1:], strict=False)], np.float32)

    def nearest(self, values: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, [(values >= m).astype(jnp.uint8) for m in self.middle])

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.array(self.values, np.float32)


@dataclasses.dataclass(frozen=True)
class Floats(Levels):
    """Floats of one sign bit, `exponent` bits and `mantissa` bits, without infinities.

    - `reserved`: how many of the largest magnitudes are NaN.
    - `negative_zero_is_nan`: for types whose magnitudes are all numbers, but which must store NaN.
    """

    exponent: int = 2
    mantissa: int = 1
    reserved: int = 0
    negative_zero_is_nan: bool = False

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def _magnitudes(self) -> int:
        return 2 ** (self.bits - 1) - self.reserved

    def decode(self, codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        magnitude = codes & (2 ** (self.bits - 1) - 1)
        exponent, fraction = magnitude >> self.mantissa, magnitude & (2**self.mantissa - 1)
        fraction = jnp.where(exponent > 0, fraction + 2**self.mantissa, fraction).astype(jnp.float32)
        value = fraction * power_of_two(jnp.maximum(exponent, 1) - self.bias - self.mantissa)
        value = jnp.where(codes >> (self.bits - 1) > 0, -value, value)
        if self.negative_zero_is_nan:
            value = jnp.where(codes == 2 ** (self.bits - 1), jnp.nan, value)
        return jnp.where(magnitude >= self._magnitudes, jnp.nan, value) if self.reserved else value

    def nearest(self, values: jax.Array) -> jax.Array:
        magnitude = jnp.minimum(jnp.abs(values), self.largest)
        exponent = jnp.clip(exponent_of(magnitude), 1 - self.bias, None)
        # To nearest, ties to even, which is to the even code. A carry into the exponent is the next code.
        steps = jnp.round(magnitude * power_of_two(self.mantissa - exponent)).astype(jnp.int32)
        codes = steps + ((exponent + self.bias - 1) << self.mantissa)
        codes = jnp.clip(codes, 0, self._magnitudes - 1)
        negative = jax.lax.bitcast_convert_type(values, jnp.int32) < 0
        if self.negative_zero_is_nan:
            negative &= codes > 0
        codes |= negative.astype(jnp.int32) << (self.bits - 1)
        if self.nan_code is not None:
            codes = jnp.where(jnp.isnan(values), self.nan_code, codes)
        return codes.astype(jnp.uint8)

    @property
    def nan_code(self) -> int | None:
        """A code that means NaN; None if there is none."""
        if self.negative_zero_is_nan:
            return 2 ** (self.bits - 1)
        return 2 ** (self.bits - 1) - 1 if self.reserved else None

    @functools.cached_property
    def table(self) -> np.ndarray:
        codes = np.arange(2**self.bits)
        magnitude = codes & 2 ** (self.bits - 1) - 1
        exponent, fraction = magnitude >> self.mantissa, magnitude & 2**self.mantissa - 1
        fraction = np.where(exponent > 0, fraction + 2**self.mantissa, fraction)
        value = fraction * 2.0 ** (np.maximum(exponent, 1) - self.bias - self.mantissa)
        value = np.where(codes >> (self.bits - 1) > 0, -value, value)
        is_nan = (magnitude >= self._magnitudes) | (self.negative_zero_is_nan & (codes == 2 ** (self.bits - 1)))
        return np.where(is_nan, np.nan, value).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Powers(Levels):
    """Powers of two, the scales of the MX formats (E8M0): `level = 2 ** (code - 127)`, and NaN for code 255."""

    def decode(self, codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        bits = jnp.where(codes > 0, codes << 23, 1 << 22)  # 2 ** -127 is subnormal
        return jnp.where(codes == 255, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))

    def nearest(self, values: jax.Array) -> jax.Array:
        """The codes of the largest powers that are not above the values, which are positive."""
        return jnp.where(jnp.isnan(values), 255, jnp.clip(exponent_of(values) + 127, 0, 254)).astype(jnp.uint8)

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan], np.float32)

    @property
    def nan_code(self) -> int | None:
        return 255


def chosen(codes: jax.Array, values: tuple[float, ...] | np.ndarray) -> jax.Array:
    """`values[codes]` by selects, which work inside a kernel's tile and on any mesh, where a gather does not."""
    left = [jnp.float32(value) for value in values]
    bit = 1
    while len(left) > 1:
        odd = (codes & codes.dtype.type(bit)) != 0
        left = [jnp.where(odd, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
        bit *= 2
    return left[0]


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2 ** exponent as float32, exactly, for exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def exponent_of(values: jax.Array) -> jax.Array:
    """floor(log2(|x|)), exactly; -127 for zeros and subnormals."""
    return ((jax.lax.bitcast_convert_type(values, jnp.int32) >> 23) & 255) - 127
