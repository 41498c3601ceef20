"""Put small faults into copies of the sources, one at a time: the tests must notice each.

python tests/mutations.py [--only TEXT] [--jobs 2]

A fault names the tests that should notice it, all of them in the first two tiers (`make test`, `make test-more`), so
that a run takes seconds. Before the faults, all these tests run on the sources as they are, and must pass. A fault
survives if its tests pass; then a test is missing, or the fault changes nothing.

Processes are forked after JAX is imported and before it starts, each with its own copy.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LONGEST = 1800  # seconds for the tests of one fault


class Fault(NamedTuple):
    """`before`, which the file has once, becomes `after`; `tests` are arguments of pytest."""

    file: str
    before: str
    after: str
    tests: str


FAULTS = [
    # --- runtime
    Fault(
        "runtime/_interpret.py",
        "_replace(rows=True) if takes_rows(eqn) else known",
        "_replace(rows=False) if takes_rows(eqn) else known",
        "tests/test_policy.py -k looked_up_by_a_slice",
    ),
    Fault(
        "runtime/_interpret.py",
        "x.warn_on_materialize and key not in _warned",
        "x.warn_on_materialize",
        "tests/test_policy.py -k warns_once",
    ),
    Fault(
        "runtime/_interpret.py",
        "np.shape(out) != aval.shape or _dtype(out) != aval.dtype",
        "np.shape(out) != aval.shape",
        "tests/test_register.py -k returns_another_type",
    ),
    Fault(
        "runtime/_interpret.py",
        "for array in captured:  # it is dequantized when it is lowered",
        "for array in captured[:0]:",
        "tests/test_policy.py -k captures_in_programs",
    ),
    Fault(
        "runtime/_register.py",
        "key=lambda r: (r.precedence, r.order)",
        "key=lambda r: (r.order, r.precedence)",
        "tests/test_register.py -k most_specific",
    ),
    Fault(
        "runtime/_register.py",
        "if any(value is not None for name, value in params.items() if name not in self.keywords):",
        "if False:",
        "tests/test_register.py -k does_not_name_a_parameter",
    ),
    Fault(
        "runtime/_control.py",
        "reverse=scan.reverse",
        "reverse=False",
        "tests/test_transforms.py -k 'equals_the_dense and scan_reversed_and_unrolled-q3-axis-2'",
    ),
    Fault(
        "runtime/_control.py",
        "unroll=scan.unroll",
        "unroll=1",
        "tests/test_control.py -k parameters_of_a_scan",
    ),
    Fault(
        "runtime/_control.py",
        "policy=checkpoint.policy",
        "policy=None",
        "tests/test_control.py -k policy_of_a_checkpoint",
    ),
    Fault(
        "runtime/_control.py",
        "donate_argnums=jit.donated, keep_unused=jit.keep_unused, inline=jit.inline",
        "keep_unused=jit.keep_unused, inline=jit.inline",
        "tests/test_control.py -k parameters_of_a_jit",
    ),
    Fault(
        "runtime/_control.py",
        "kept = [not is_implicit(x) or _same_type(x, y)",
        "kept = [True",
        "tests/test_transforms.py -k 'equals_the_dense and scan_with_a_carry_that_changes-q3-axis-2'",
    ),
    Fault(
        "runtime/_control.py",
        "slot[0] if all(_same_type(slot[0], other) for other in slot) else None",
        "slot[0]",
        "tests/test_transforms.py -k 'equals_the_dense and cond_with_mixed_results-q3-axis-2'",
    ),
    Fault(
        "runtime/_control.py",
        "run(given.backward, *residuals, *cotangents)",
        "run(given.backward, *residuals, *(2 * c for c in cotangents))",
        "tests/test_runtime.py -k through_custom_rules",
    ),
    Fault(
        "runtime/_ste.py",
        "_replace(*primals), tangents[0]",
        "_replace(*primals), tangents[1]",
        "tests/test_outside.py -k 'ste_is_exact and q3-axis-2'",
    ),
    # --- formats
    Fault(
        "formats/blocks.py",
        "return 1 if span == WHOLE else -(-length // span)",
        "return 1 if span == WHOLE else length // span",
        "tests/test_formats.py -k 'any_shape_is_kept and nf4'",
    ),
    Fault(
        "formats/blocks.py",
        "(groups[..., i] << np.uint8(8 - bits * (i + 1)))",
        "(groups[..., i] << np.uint8(bits * i))",
        "tests/test_formats.py -k nf4_bits_are_those",
    ),
    Fault(
        "formats/levels.py",
        "jnp.clip(exponent_of(magnitude), 1 - self.bias, None)",
        "jnp.clip(exponent_of(magnitude), -self.bias, None)",
        "tests/test_packed.py -k small_floats",
    ),
    Fault(
        "formats/levels.py",
        "[(values >= m).astype(jnp.uint8) for m in self.middle]",
        "[(values > m).astype(jnp.uint8) for m in self.middle]",
        "tests/test_packed.py -k halfway",
    ),
    Fault(
        "formats/levels.py",
        "jnp.where(codes > 0, codes << 23, 1 << 22)",
        "codes << 23",
        "tests/test_packed.py -k table_of_levels",
    ),
    Fault(
        "formats/nf4.py",
        "[(relative > m).astype(jnp.uint8) for m in midpoints]",
        "[(relative >= m).astype(jnp.uint8) for m in midpoints]",
        "tests/test_formats.py -k midpoint",
    ),
    Fault(
        "formats/nf4.py",
        "offset = ordered_sum(jnp.where(finite, flat, 0), -1, keepdims=True) / count",
        "offset = 0 * ordered_sum(jnp.where(finite, flat, 0), -1, keepdims=True) / count",
        "tests/test_formats.py -k 'nf4_bits_are_those or double_quantization_costs'",
    ),
    Fault(
        "formats/int8.py",
        "jnp.clip(jnp.nan_to_num(codes), -127, 127)",
        "jnp.clip(jnp.nan_to_num(codes), -128, 127)",
        "tests/test_formats.py -k clipped_on_both_sides",
    ),
    Fault(
        "formats/onebit.py",
        "positive = array >= 0",
        "positive = array > 0",
        "tests/test_formats.py -k binary_is_the_sign",
    ),
    Fault(
        "formats/onebit.py",
        "return 0.5 * jnp.sqrt(",
        "return 0.7 * jnp.sqrt(",
        "tests/test_formats.py -k ternary_scale_has",
    ),
    Fault(
        "formats/packed.py",
        "_Q4 = (-19, -15, -12,",
        "_Q4 = (-20, -15, -12,",
        "tests/test_packed.py -k levels_of_the_formats_do_not_change",
    ),
    Fault(
        "formats/packed.py",
        'low = low | more << (8 // self.packing["codes"])',
        "low = low | more << 1",
        "tests/test_formats.py -k 'error_and_bits and q3'",
    ),
    Fault(
        "formats/packed.py",
        "return -offsets * unit",
        "return offsets * unit",
        "tests/test_file_layouts.py -k values_are_those",
    ),
    Fault(
        "formats/quantized.py",
        "return self if keeps else self.plain()",
        "return self",
        "tests/test_rules.py -k 'structural_rules and q3-axis-2 and slice_of_rows'",
    ),
    Fault(
        "formats/search.py",
        'weights if weighting == "square" else jnp.sqrt(weights)',
        "weights",
        "tests/test_native_encode.py -k 'search_gives'",
    ),
    # --- rules
    Fault(
        "rules/structural.py",
        "    return w.reshaped(\n        [shape[a] for a in order],\n        [spans[a] for a in order],",
        "    return w.reshaped(\n        [shape[a] for a in order],\n        spans,",
        "tests/test_rules.py -k 'structural_rules and nf4-axis-1 and transpose_all'",
    ),
    Fault(
        "rules/structural.py",
        "            at[a] = start // spans[a]\n",
        "            at[a] = start\n",
        "tests/test_rules.py -k 'structural_rules and nf4-axis-1 and slice_of_columns'",
    ),
    Fault(
        "rules/structural.py",
        "SMALLEST_SPLIT_BLOCK = 16",
        "SMALLEST_SPLIT_BLOCK = 1",
        "tests/test_rules.py -k too_small",
    ),
    Fault(
        "rules/structural.py",
        "return int(np.clip(start, 0, length - size))",
        "return int(start)",
        "tests/test_rules.py -k out_of_bounds",
    ),
    Fault(
        "rules/structural.py",
        "return any(spans[a] != WHOLE and shape[a] > spans[a] and shape[a] % spans[a] for a in axes)",
        "return False",
        "tests/test_rules.py -k reversed_with_a_short_block",
    ),
    Fault(
        "rules/contraction.py",
        "*(of_w + of_x if weight_first else of_x + of_w)",
        "*(of_x + of_w)",
        "tests/test_transforms.py -k 'equals_the_dense and einsum_weight_first-q3-axis-2'",
    ),
    Fault(
        "rules/contraction.py",
        "dtype = preferred_element_type or jnp.promote_types(x.dtype, w.dtype)",
        "dtype = jnp.promote_types(x.dtype, w.dtype)",
        "tests/test_transforms.py -k 'equals_the_dense and preferred_element_type-q3-axis-2'",
    ),
    Fault(
        "rules/lookup.py",
        "jnp.any((indices < 0) | (indices > last), axis=-1)",
        "jnp.any(indices < 0, axis=-1)",
        "tests/test_transforms.py -k 'equals_the_dense and embedding_out_of_bounds-q3-axis-2'",
    ),
    Fault(
        "rules/joining.py",
        "(spans[axis] > 1 and any(n % spans[axis] for n in lengths[:-1]))",
        "False",
        "tests/test_rules.py -k short_block_is_not_joined",
    ),
    Fault(
        "rules/joining.py",
        "name: jnp.result_type(*(getattr(a, name).dtype for a in arrays))",
        "name: getattr(arrays[0], name).dtype",
        "tests/test_components.py -k 'meet_in_the_wider and nf4-axis-1'",
    ),
    Fault(
        "rules/elementwise.py",
        "isinstance(by, Tracer) or np.ndim(by)",
        "np.ndim(by)",
        "tests/test_rules.py -k 'numbers_scale and nf4-axis-1'",
    ),
    # --- operations and kernels
    Fault(
        "ops/matmul.py",
        'out_sharding=x.aval.sharding if given else None,\n        arithmetic="exact",',
        "out_sharding=x.aval.sharding if given else None,",
        "tests/test_config.py -k gradients_are_exact",
    ),
    Fault(
        "ops/matmul.py",
        "wide = jnp.promote_types(product.dtype, jnp.float32)\n    y = matmul",
        "wide = product.dtype\n    y = matmul",
        "tests/test_gpu.py -k offsets_are_added_before",
    ),
    Fault(
        "ops/partition.py",
        "{tree} {w.format and w.format.layout}",
        "",
        "tests/test_compilation_cache.py -k distinct_and_hold",
    ),
    Fault(
        "ops/take.py",
        "return call(lax.stop_gradient(w), rows)",
        "return call(w, rows)",
        "tests/test_rules.py -k 'gradients_stop and q3-axis-2'",
    ),
    Fault(
        "dispatch.py",
        "next(choice for choice in choices if choice is not None)",
        "next(choice for choice in reversed(choices) if choice is not None)",
        "tests/test_config.py -k a_setting_wins",
    ),
    Fault(
        "kernels/reference.py",
        "else jnp.promote_types(dtype, jnp.float32)\n    batch",
        "else dtype\n    batch",
        "tests/test_rules.py -k reference_sums_in_float32",
    ),
    Fault(
        "kernels/groups.py",
        "(ends - 1) // tile - first + 1",
        "ends // tile - first + 1",
        "tests/test_groups.py -k steps_visit",
    ),
    Fault(
        "kernels/cpu.py",
        "and not rounded",
        "",
        "tests/test_file_layouts.py -k zero_points",
    ),
    Fault(
        "kernels/gpu/kernel.py",
        "if tiling.after and spans[contract] == WHOLE:",
        "if False:",
        "tests/test_gpu.py -k 'odd_sizes and int8-axis'",
    ),
    Fault(
        "kernels/tpu/decode.py",
        "jnp.where(index >= SUBLANES, high, low)",
        "jnp.where(index > SUBLANES, high, low)",
        "tests/test_tpu.py -k 'odd_shapes and nf4-axis-1 and float32'",
    ),
]


def copy_of_the_sources(folder: Path) -> Path:
    """A folder with the package in it, and with the library that is installed."""
    shutil.copytree(ROOT / "src" / "lowbit", folder / "lowbit", ignore=shutil.ignore_patterns("__pycache__"))
    spec = find_spec("lowbit")
    assert spec is not None and spec.submodule_search_locations is not None
    for place in spec.submodule_search_locations:
        for library in (Path(place) / "kernels").glob("lowbit_native.so"):
            shutil.copy(library, folder / "lowbit" / "kernels")
    return folder


def started(sources: Path, tests: str) -> int:
    """A child that runs these tests on these sources: exit code 0 if all passed, 1 if some failed."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        with (sources / "output").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        signal.alarm(LONGEST)
        code = _in_the_child(sources, tests)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _in_the_child(sources: Path, tests: str) -> int:
    import pytest

    os.chdir(ROOT)
    # An editable install may import lowbit by a finder of its own, before the path is asked.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "lowbit" not in type(finder).__module__]
    sys.path.insert(0, str(sources))
    import lowbit

    assert Path(lowbit.__file__).is_relative_to(sources), f"{lowbit.__file__} is not in {sources}"
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "-m", "not every", *shlex.split(tests)]))


def with_fault(sources: Path, fault: Fault) -> None:
    path = sources / "lowbit" / fault.file
    source = path.read_text()
    assert source.count(fault.before) == 1, f"{fault.file} has {source.count(fault.before)} times: {fault.before}"
    path.write_text(source.replace(fault.before, fault.after))


def results(faults: Sequence[Fault], jobs: int) -> Iterator[tuple[Fault, int, str]]:
    """Each fault with the exit code of its tests and the end of their output, as they end."""
    left, running = list(faults), {}
    while left or running:
        while left and len(running) < jobs:
            fault = left.pop(0)
            folder = tempfile.TemporaryDirectory()
            sources = copy_of_the_sources(Path(folder.name))
            if fault.before:
                with_fault(sources, fault)
            running[started(sources, fault.tests)] = fault, folder
        child, status = os.wait()
        fault, folder = running.pop(child)
        text = (Path(folder.name) / "output").read_text().strip().splitlines()
        folder.cleanup()
        yield fault, os.waitstatus_to_exitcode(status), "\n".join(text[-15:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or tests have this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--skip-sound", action="store_true", help="do not run the tests on the sources as they are")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:
        # Most programs are the same with a fault as without; tests/conftest.py shares what is compiled.
        os.environ.setdefault("LOWBIT_TEST_COMPILED", compiled)
        return check(args)


def check(args: argparse.Namespace) -> int:
    import jax  # before the forks
    import pytest

    del jax, pytest
    chosen = [fault for fault in FAULTS if args.only in fault.file + " " + fault.tests]
    wrong = []
    # On the sources as they are: all tests pass, and there are some.
    selections = [] if args.skip_sound else dict.fromkeys(fault.tests for fault in chosen)
    for fault, code, text in results([Fault("", "", "", tests) for tests in selections], args.jobs):
        if code != 0:
            wrong.append(f"does not pass without a fault: {fault.tests}\n{text}")
    for fault, code, text in results(chosen, args.jobs):
        noticed = code == 1 or code == -signal.SIGALRM  # a test that hangs has noticed too
        change = f"{fault.file}: {fault.before!r} -> {fault.after!r}"
        print("noticed " if noticed else "SURVIVED", change, flush=True)
        if not noticed:
            wrong.append(f"survived: {change}\n{fault.tests} ended with {code}\n{text}")
    print(*wrong, sep="\n\n")
    print(f"{len(chosen)} faults, {len(wrong)} problems.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
