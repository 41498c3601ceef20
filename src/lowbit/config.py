"""quantize() and its configuration: format, block size, axis, and how products run."""

import dataclasses
import enum
import inspect
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from .formats import FORMATS, Format, QuantizedArray, checked_input, spread
from .formats.calibrated import Calibrated, calibrated
from .formats.components import checked_scale_dtype
from .formats.moments import Moments
from .runtime import dense, ste


class QuantizationType(enum.StrEnum):
    """The built-in formats by name. A plain string works as well, also for custom formats.

    >>> import lowbit
    >>> lowbit.QuantizationType("nf4"), lowbit.QuantizationType.INT8 == "int8"
    (<QuantizationType.NF4: 'nf4'>, True)
    """

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"
    Q4 = "q4"
    Q3 = "q3"
    Q2 = "q2"
    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT5 = "int5"
    INT6 = "int6"
    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How to quantize, and how products of the array run. Hashable.

    - `dtype`: the format, a `QuantizationType` or its name.
    - `block_size`: how many elements along `axis` share a scale. None is the format's default: 64 for NF4, 32 for q4,
      q3, q2, int2 to int6 and mxfp4, 16 for nvfp4, and one scale for the whole axis for the others.
    - `axis`: along which elements share a scale. None is the axis that `x @ w` contracts, -2 (-1 for an array with one
      axis): the contracted axis gives the smallest error and the fastest product.
    - `simulate`: return the dequantized array, with a straight-through gradient.
    - `double_quant`: store NF4's scales in 8 bits.
    - `absmean`: ternary as in BitNet b1.58, with mean |w| for a scale and half of it for a threshold.
    - `offset`: int2 to int6 with an offset for each block, so that levels need not be symmetric around 0.
    - `search`: whether to search for the scales with the least error; False takes the largest magnitude of each block.
      None is the default of the format: q2 to q4 and int2 to int6 search along a single axis.
    - `scale_dtype`: the dtype of the scales of int2 to int8 and fp8: "float32" (the default), "bfloat16" or "float16".
    - `use_kernel`, `compute`: stored with the array; the settings of the same names take precedence.

    >>> import jax.numpy as jnp, lowbit
    >>> config = lowbit.QuantizationConfig("nf4", block_size=32, axis=-2)
    >>> lowbit.quantize(jnp.ones((64, 8)), config).absmax.shape
    (2, 8)
    >>> lowbit.quantize(jnp.ones((64, 8)), lowbit.QuantizationConfig("int8", block_size=32, axis=-2)).scale.shape
    (2, 8)
    """

    dtype: QuantizationType | str = QuantizationType.NF4
    block_size: int | None = None
    simulate: bool = False
    use_kernel: bool = True
    _: dataclasses.KW_ONLY
    axis: int | tuple[int, ...] | None = None
    double_quant: bool = False
    absmean: bool = False
    compute: str = "exact"
    offset: bool = False
    search: bool | None = None
    scale_dtype: str | None = None

    def __post_init__(self) -> None:
        name = str(self.dtype)
        if name not in FORMATS:
            raise ValueError(f"Unknown quantization type {name!r}: it must be one of {', '.join(FORMATS)}.")
        known = [member for member in QuantizationType if member == name]
        object.__setattr__(self, "dtype", known[0] if known else name)
        if isinstance(self.axis, list):
            object.__setattr__(self, "axis", tuple(self.axis))
        if self.compute not in ("exact", "fast"):
            raise ValueError(f"compute={self.compute!r}: the value must be one of 'exact', 'fast'.")
        if self.scale_dtype is not None:
            object.__setattr__(self, "scale_dtype", checked_scale_dtype(self.scale_dtype, name).name)
        for option, default in _OPTIONS.items():
            if getattr(self, option) != default and option not in self.format.options:
                raise ValueError(_refusal(option, getattr(self, option), self.format))

    @property
    def format(self) -> Format:
        """The row of the table of formats."""
        return FORMATS[str(self.dtype)]


# The fields that only some formats take (`Format.options`), with their defaults.
_OPTIONS = {"double_quant": False, "absmean": False, "offset": False, "search": None, "scale_dtype": None}


def _refusal(option: str, value: Any, format: Format) -> str:
    able = ", ".join(f.name for f in FORMATS.values() if option in f.options)
    coded = format.layout is not None and format.layout.scales is not None
    why = {
        "double_quant": "; its scales are in 8 bits already" if coded else "",
        "scale_dtype": "; its scales are stored as 8-bit codes" if coded else "; its scales are float32",
    }
    return f"{option}={value!r} is for {able}, not for {format.name!r}{why.get(option, '')}."


@overload
def quantize(
    array: Any,
    config: QuantizationConfig | str | None = ...,
    dtype: QuantizationType | str | None = ...,
    block_size: int | None = ...,
    *,
    simulate: Literal[True],
    axis: int | Sequence[int] | None = ...,
    double_quant: bool | None = ...,
    absmean: bool | None = ...,
    offset: bool | None = ...,
    search: bool | None = ...,
    scale_dtype: Any = ...,
    use_kernel: bool | None = ...,
    compute: str | None = ...,
    scale: Any = ...,
) -> jax.Array: ...
@overload
def quantize(
    array: Any,
    config: QuantizationConfig | str | None = ...,
    dtype: QuantizationType | str | None = ...,
    block_size: int | None = ...,
    simulate: Literal[False] | None = ...,
    *,
    axis: int | Sequence[int] | None = ...,
    double_quant: bool | None = ...,
    absmean: bool | None = ...,
    offset: bool | None = ...,
    search: bool | None = ...,
    scale_dtype: Any = ...,
    use_kernel: bool | None = ...,
    compute: str | None = ...,
    scale: Any = ...,
    hessian: Any = ...,
) -> QuantizedArray: ...
def quantize(
    array: Any,
    config: QuantizationConfig | str | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int | None = None,
    simulate: bool | None = None,
    *,
    axis: int | Sequence[int] | None = None,
    double_quant: bool | None = None,
    absmean: bool | None = None,
    offset: bool | None = None,
    search: bool | None = None,
    scale_dtype: Any = None,
    use_kernel: bool | None = None,
    compute: str | None = None,
    scale: Any = None,
    hessian: Any = None,
) -> Any:
    """Quantize an array, or with `simulate` quantize and dequantize it.

    - `config`: a `QuantizationConfig`, or the name of a format. The default is NF4.
    - `scale`: the scales to use, for instance learned ones, instead of those computed from the array.
    - `hessian`: second moments x^T x of the inputs that the array will be multiplied with along its axis, of shape
      `(K, K)`, or `(*stack, K, K)` for leading axes with inputs of their own. The array is then rounded by GPTQ, so
      that products with these inputs change least. A vector `(K,)` or `(*stack, K)`, their diagonal, weights the search
      for scales. `calibrate` collects them for a whole model.
    - The other arguments are those of `QuantizationConfig`, for use without one. An argument that contradicts
      the config raises a `ValueError`.

    >>> import jax.numpy as jnp, lowbit
    >>> w = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    >>> q = lowbit.quantize(w, "int8")
    >>> type(q).__name__, q.shape, (jnp.ones((2, 64)) @ q).shape
    ('Array8B', (64, 32), (2, 32))
    """
    config = resolved_config(
        config,
        dtype=dtype,
        block_size=block_size,
        simulate=simulate,
        axis=axis,
        double_quant=double_quant,
        absmean=absmean,
        offset=offset,
        search=search,
        scale_dtype=scale_dtype,
        use_kernel=use_kernel,
        compute=compute,
    )
    if hessian is None:
        return straight_through(array, config, scale=scale) if config.simulate else _quantize(array, config, scale)
    if config.simulate or scale is not None:
        raise ValueError("hessian= chooses scales and codes: leave out scale= and simulate=.")
    array = checked_input(array, str(config.dtype))
    return quantize_calibrated(array, config, _moments(array, config, hessian)).array


def straight_through(
    array: Any,
    config: QuantizationConfig | str | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int | None = None,
    *,
    axis: int | Sequence[int] | None = None,
    double_quant: bool | None = None,
    absmean: bool | None = None,
    offset: bool | None = None,
    search: bool | None = None,
    scale_dtype: Any = None,
    amount: Any = 1,
    clip: float | None = None,
    scale: Any = None,
) -> jax.Array:
    """Quantize and dequantize with a straight-through gradient, for quantization-aware training (QAT).

    - `config`, `dtype`, `block_size`, `axis`, `double_quant`, `absmean`, `offset`, `search`, `scale_dtype`: as for
      `quantize`.
    - `amount`: 1 for the quantized values, 0 for the array itself, `(1 - amount) * array + amount * quantized` between
      them. It may be traced: `amount=step >= 1000` is a warm-up.
    - `clip`: no gradient for elements beyond `clip` times the largest representable magnitude, so that saturated
      weights do not grow.
    - `scale`: learned scales, in the stored shape. They get the gradient of a learned step size (LSQ,
      arXiv:1902.08153); `clip` is then 1 by default.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> w, x = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.ones((2, 8))
    >>> g = jax.grad(lambda w: (x @ lowbit.straight_through(w, dtype="ternary")).sum())(w)
    >>> bool((g == jax.grad(lambda w: (x @ w).sum())(w)).all())
    True
    """
    config = resolved_config(
        config,
        dtype=dtype,
        block_size=block_size,
        axis=axis,
        double_quant=double_quant,
        absmean=absmean,
        offset=offset,
        search=search,
        scale_dtype=scale_dtype,
    )
    array = jnp.asarray(dense(array))
    if clip is None and scale is None:
        through = ste(lambda array: _quantize(array, config))(array)
    else:
        through = _within_range(array, config, clip, scale)
    if isinstance(amount, int | float) and amount == 1:
        return through
    amount = lax.stop_gradient(jnp.asarray(amount, array.dtype))
    return (1 - amount) * array + amount * through  # at 0 and 1 exactly one of the two


def resolved_config(config: QuantizationConfig | str | None, **given: Any) -> QuantizationConfig:
    """The config, or one made of the arguments that are not None. Raises if they contradict each other."""
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(given.get("axis"), list):
        given["axis"] = tuple(given["axis"])
    if "scale_dtype" in given:
        given["scale_dtype"] = checked_scale_dtype(given["scale_dtype"], "quantize").name
    if isinstance(config, str):
        if given.setdefault("dtype", config) != config:
            raise _contradiction("dtype", given["dtype"], config)
        config = None
    if config is None:
        return QuantizationConfig(**given)
    if not isinstance(config, QuantizationConfig):
        raise TypeError(f"config must be a QuantizationConfig or the name of a format, not {config!r}.")
    for name, value in given.items():
        own = getattr(config, name)
        own = default_block_size(config.format) if name == "block_size" and own is None else own
        if value != own:
            raise _contradiction(name, value, own)
    return config


def _contradiction(name: str, value: Any, own: Any) -> ValueError:
    value, own = (str(v) if isinstance(v, str) else v for v in (value, own))  # a format as plain text
    return ValueError(
        f"{name}={value!r} contradicts the config, which has {name}={own!r}: leave one of them out, or pass "
        f"dataclasses.replace(config, {name}={value!r})."
    )


def default_block_size(format: Format) -> int | None:
    """The default block size of a format; None for one scale along the whole axis."""
    if format.layout is not None:
        return format.layout.block_size
    parameter = inspect.signature(format.quantize).parameters.get("block_size")
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def format_options(config: QuantizationConfig) -> dict[str, Any]:
    """The arguments that the config gives to the `quantize` of its format."""
    options = {name: value for name in config.format.options if (value := getattr(config, name)) is not None}
    wanted = {"axis": config.axis, "block_size": config.block_size}
    return options | {name: value for name, value in wanted.items() if value is not None}


def _quantize(array: Any, config: QuantizationConfig, scale: Any = None) -> QuantizedArray:
    options = format_options(config)
    if scale is not None:
        if config.format.top is None:
            raise ValueError(f"The format {str(config.dtype)!r} computes its scales itself and does not take scale=.")
        options["scale"] = scale
    quantized = config.format.quantize(array, **options)
    return quantized.replace(use_kernel=config.use_kernel, compute=config.compute)


def quantize_calibrated(array: jax.Array, config: QuantizationConfig, moments: Moments) -> Calibrated:
    """Quantize an array for the inputs that it is multiplied with; also the errors of products with them."""
    found = calibrated(config.format, format_options(config), array, moments)
    return found._replace(array=found.array.replace(use_kernel=config.use_kernel, compute=config.compute))


def _moments(array: jax.Array, config: QuantizationConfig, hessian: Any) -> Moments:
    """The second moments of the inputs of an array along the axis of its scales."""
    axes = (config.axis,) if isinstance(config.axis, int) else config.axis or ((-2 if array.ndim > 1 else -1),)
    if len(axes) != 1:
        raise ValueError(f"hessian= needs a single axis, that of the inputs, and the config has axis={config.axis}.")
    axis = axes[0] - array.ndim if axes[0] >= 0 else axes[0]
    h = jnp.asarray(hessian, jnp.float32)
    k = array.shape[axis]
    full = h.shape[-2:] == (k, k)
    lead = h.shape[: -2 if full else -1]
    stacked = tuple(a for a in range(-array.ndim, -2) if a != axis) if lead else ()
    if not isinstance(h, Tracer) and not bool(jnp.isfinite(h).all()):
        raise ValueError(f"hessian= of shape {h.shape} has values that are NaN or infinite.")
    diag = jnp.diagonal(h, axis1=-2, axis2=-1) if full else h
    return Moments(tuple(array.shape), (axis,), stacked, diag, h if full else None, jnp.ones(lead))


def _within_range(array: jax.Array, config: QuantizationConfig, clip: float | None, scale: Any) -> jax.Array:
    """The straight-through value without gradient beyond the largest level, and with one for a given scale."""
    if config.format.top is None:
        raise ValueError(f"clip={clip} needs the largest level of {str(config.dtype)!r}, and its Format has no `top`.")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be positive: it is in units of the largest representable magnitude.")
    quantized = _quantize(lax.stop_gradient(array), config, scale)
    value = quantized.materialize()
    scales = quantized.scale_values() if scale is None else jnp.asarray(scale, jnp.float32)
    wide = spread(scales, quantized.spans, array.shape)
    # A scale is rounded, so its largest level may be slightly below the weight it was computed from.
    limit = (1 if clip is None else clip) * config.format.top * (1 + 1e-6)
    fits = jnp.abs(array) <= limit * jnp.abs(wide)
    through = ste(lambda _: value)(jnp.where(fits, array, lax.stop_gradient(array)))
    if scale is None:
        return through
    # d scale * round(w / scale) / d scale, where the slope of round counts as 1, and as 0 beyond the largest code.
    slope = lax.stop_gradient((value - jnp.where(fits, array, 0)) / wide)
    return through + (slope * (wide - lax.stop_gradient(wide))).astype(array.dtype)
