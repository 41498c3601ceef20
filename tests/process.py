"""One of the processes that `test_processes` starts: python tests/process.py TASK PROCESS PORT FOLDER"""

import json
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_same_bits
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit
from lowbit import FORMATS, QuantizedArray
from lowbit.io.container import _header, _write

K, N = 512, 512
COLUMNS, ROWS = P(None, "x"), P("x", None)


def weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((K, N)).astype(np.float32)


def over(spec: P, *shape: int) -> NamedSharding:
    """A sharding over all devices of all processes."""
    names = ("x", "y")[: max(1, len(shape))]
    mesh = jax.make_mesh(shape or (jax.device_count(),), names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, spec)


def struct(shape: tuple[int, ...], sharding: Any, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def assert_shards(array: jax.Array, want: np.ndarray, tolerance: float = 0) -> None:
    """Assert that the shards of this process have these values."""
    assert array.shape == want.shape and array.dtype == want.dtype and not array.is_fully_addressable
    assert array.addressable_shards
    for shard in array.addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), want[shard.index], atol=tolerance, rtol=0)


def checkpoint(folder: Path) -> dict[str, Any]:
    """The tree to save, made from the dense file."""
    path, names = folder / "dense.safetensors", json.loads((folder / "formats.json").read_text())
    w, rows = (lowbit.load(path, {"w": struct((K, N), over(spec))})["w"] for spec in (COLUMNS, ROWS))
    assert (w.sharding, rows.sharding) == (over(COLUMNS), over(ROWS))
    assert_shards(w, weight())
    assert_shards(rows, weight())
    return {
        "columns": {name: lowbit.quantize(w, name, axis=-1) for name in names},
        "rows": {name: FORMATS[name].quantize(rows, axis=-2) for name in names},
        "squares": jax.device_put(w, over(P("y", "x"), 4, 2)),
        "replicated": jax.device_put(np.arange(6, dtype=np.int32), over(P())),
        "none": jax.device_put(np.zeros((0, 8), np.float32), over(P(None, "x"))),
        "number": jnp.float32(jax.process_index()),  # differs between processes; that of the first is saved
        "host": np.arange(3, dtype=np.int64),
        "tuple": (w, 7, None, "text"),
    }


def run(process: int, folder: Path) -> Any:
    damaged_bytes_of_others_are_not_read(process, folder)
    tree = checkpoint(folder)
    products_are_those_of_the_dense_weights(tree, folder)
    path = folder / "model.safetensors"
    lowbit.save(path, {"old": tree["columns"]["int8"]})
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    failures = [
        *failing_to_write(process, path, tree),
        *failing_to_publish(process, path, tree),
        *differing(process, path, tree),
    ]
    multihost_utils.sync_global_devices("failed")
    after = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert after == before, [name for name in {**before, **after} if before.get(name) != after.get(name)]
    multihost_utils.sync_global_devices("compared")
    lowbit.save(path, tree, metadata={"step": 3})
    want = whole(tree, folder)
    if process == 0:
        (folder / "want.pickle").write_bytes(pickle.dumps(want))
    return failures


def damaged_bytes_of_others_are_not_read(process: int, folder: Path) -> None:
    """Damage in the rows of the other process goes unnoticed, since they are not read."""
    path, read, taken = folder / f"damaged-{process}.safetensors", _header.Tensor.read, []

    def counting(self: Any, wanted: Any) -> np.ndarray:
        taken.append(read(self, wanted))
        return taken[-1]

    _header.Tensor.read = counting
    got = lowbit.load(path, {"w": struct((K, N), over(ROWS))})["w"]
    _header.Tensor.read = read
    assert_shards(got, weight())
    assert [array.nbytes for array in taken] == [K * N * 4 // 8] * 4
    for like in (None, {"w": struct((K, N), over(P()))}):
        try:
            lowbit.load(path, like)
        except ValueError as error:
            assert "tensor 'w' is damaged: its bytes do not match its checksum" in str(error), error
        else:
            raise AssertionError("a tensor that is read whole must be checked")


def whole(tree: Any, folder: Path) -> Any:
    """Gather the shards of all processes as numpy arrays, through files. Every process must call it."""
    leaves, structure = jax.tree.flatten(tree)
    sharded = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.is_fully_addressable]
    own = {i: [(shard.index, np.asarray(shard.data)) for shard in leaves[i].addressable_shards] for i in sharded}
    number = len(list(folder.glob(f"shards-*-{jax.process_index()}.pickle")))
    (folder / f"shards-{number}-{jax.process_index()}.pickle").write_bytes(pickle.dumps(own))
    multihost_utils.sync_global_devices("written")
    found = [np.empty(x.shape, x.dtype) if i in sharded else x for i, x in enumerate(leaves)]
    for process in range(jax.process_count()):
        for i, shards in pickle.loads((folder / f"shards-{number}-{process}.pickle").read_bytes()).items():
            for index, data in shards:
                found[i][index] = data
    return jax.tree.unflatten(structure, [np.asarray(x) if isinstance(x, jax.Array) else x for x in found])


def products_are_those_of_the_dense_weights(tree: dict[str, Any], folder: Path) -> None:
    x = np.random.default_rng(2).standard_normal((8, K)).astype(np.float32)
    product = jax.jit(lambda x, w: x @ w)
    stored = whole(tree, folder)
    with lowbit.materialization("error"):
        for name in tree["columns"]:
            for kind, spec, x_spec in (("columns", COLUMNS, P()), ("rows", ROWS, COLUMNS)):
                q = tree[kind][name]
                assert q.sharding == over(spec), (name, q.sharding)
                dense = np.asarray(stored[kind][name].materialize())
                if kind == "columns":  # a mean over shards is rounded differently from one over the whole
                    alone = lowbit.quantize(jnp.asarray(weight()), name, axis=-1)
                    np.testing.assert_allclose(dense, alone.materialize(), atol=1e-6, rtol=1e-6)
                want = x @ dense
                y = product(jax.device_put(x, over(x_spec)), q)
                assert_shards(y, want, 2e-5 * np.abs(want).max())


def raised(act: Any) -> str:
    try:
        act()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def failing_to_write(process: int, path: Path, tree: Any) -> list[str]:
    """The disk of one process is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        return [raised(lambda: lowbit.save(path, tree))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def failing_to_publish(process: int, path: Path, tree: Any) -> list[str]:
    """The shard files are written, and the index is not."""
    write = _write.write_file

    def failing(target: Path, *args: Any) -> bytes:
        if target == path:
            raise OSError(28, "No space left on device")
        return write(target, *args)

    _write.write_file = failing
    try:
        return [raised(lambda: lowbit.save(path, tree))]
    finally:
        _write.write_file = write


def differing(process: int, path: Path, tree: Any) -> list[str]:
    """One process has another tree, or a leaf that cannot be saved."""
    other = {"w": np.zeros(2 + process)}
    wrong = {"w": np.zeros(2) if process == 0 else b"x"}
    try:
        lowbit.save(path, wrong)
    except (TypeError, OSError) as error:
        return [raised(lambda: lowbit.save(path, other)), f"{type(error).__name__}: {error}"]
    raise AssertionError("it was saved")


def restart(process: int, folder: Path) -> Any:
    """Load the arrays on another number of devices with other shardings."""
    path, want = folder / "model.safetensors", pickle.loads((folder / "want.pickle").read_bytes())
    for sharding in (over(COLUMNS), over(ROWS), over(P("y", "x"), 2, jax.device_count() // 2)):
        tree = loaded(path, want, sharding)
        got = whole(tree, folder)
        same = jax.tree.leaves(jax.tree.map(np.array_equal, got, want))
        assert len(same) > 20 and all(same)
        for array in (*tree["columns"].values(), *tree["rows"].values(), tree["squares"], tree["tuple"][0]):
            assert array.sharding == sharding
    again = folder / "again.safetensors"
    lowbit.save(again, tree)
    assert_same_bits(lowbit.load(again)["columns"]["nf4"], lowbit.load(path)["columns"]["nf4"])
    return sorted(file.name for file in folder.glob("again*"))


def loaded(path: Path, want: Any, sharding: NamedSharding) -> Any:
    """The checkpoint with this sharding for each weight."""

    def laid_out(leaf: Any) -> Any:
        return struct((K, N), sharding) if getattr(leaf, "shape", None) == (K, N) else leaf

    return lowbit.load(path, jax.tree.map(laid_out, want, is_leaf=lambda x: isinstance(x, QuantizedArray)))


if __name__ == "__main__":
    task, process, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    result = {"run": run, "restart": restart}[task](process, folder)
    (folder / f"{task}-{process}.json").write_text(json.dumps(result))
