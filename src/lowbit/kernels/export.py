"""What `jax.export` needs to accept the kernels."""

from jax import export

# The native library's targets on CPU, and the Triton call that Pallas makes on GPU. JAX exports its TPU call unasked.
CUSTOM_CALLS = (
    "lowbit_matmul",
    "lowbit_take",
    "lowbit_squares",
    "lowbit_encode",
    "lowbit_search",
    "__gpu$xla.gpu.triton",
)


def export_checks() -> list[export.DisabledSafetyCheck]:
    """The `disabled_checks` with which `jax.export.export` accepts the kernels of lowbit.

    JAX refuses to export a custom call that it does not know, since it cannot promise that a later version runs it.
    Whoever runs the exported program on a CPU has to import the same version of lowbit first, which registers the
    kernels. A program exported under `use_kernel(False)` runs everywhere and needs none of this.

    >>> import jax, jax.numpy as jnp, lowbit
    >>> from jax import export
    >>> x, q = jnp.ones((2, 64)), lowbit.quantize(jnp.ones((64, 32)), "int8")
    >>> components, tree = jax.tree.flatten(q)  # an exported function takes plain arrays
    >>> program = jax.jit(lambda x, *components: x @ jax.tree.unflatten(tree, components))
    >>> exported = export.export(program, disabled_checks=lowbit.export_checks())(x, *components)
    >>> again = export.deserialize(exported.serialize())
    >>> bool((again.call(x, *components) == x @ q).all())
    True
    """
    return [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
