"""Lowbit files with wrong contents and the right checksums: each is one error."""

import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files_helpers import assert_same, reads, refused, saved, signed

from lowbit import Array8B
from lowbit.io import LowbitFile, _dtypes, load, save
from lowbit.io.container import _header

CODES, SCALES = np.arange(32, dtype=np.int8).reshape(4, 8), np.ones((4, 1), np.float32)
STATIC = {"dtype": {"dtype": "F32"}, "spans": [0], "lengths": [], "transposed": False, "use_kernel": True}
STATIC |= {"compute": "exact"}
COMPONENTS = {"codes": "w/codes", "scales": "w/scales", "index": None}
TENSORS = {"w/codes": CODES, "w/scales": SCALES}


def quantized(cls: str = "Array8B", parts: Any = COMPONENTS, **static: Any) -> dict[str, Any]:
    return {"quantized": cls, "static": STATIC | static, "parts": parts}


def one(node: Any) -> Any:
    return ["dict", [["w", node]]]


def forged(
    folder: Path,
    tree: Any,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    texts: dict[str, Any] | None = None,
    entries: dict[str, Any] | None = None,
    crc32: Any = None,
    replace: tuple[bytes, bytes] = (b"", b""),
) -> Path:
    """A file with any contents and the right checksums."""
    tensors = TENSORS if tensors is None else tensors
    data = b"".join(array.tobytes() for array in tensors.values())
    sums = {name: f"{zlib.crc32(array.tobytes()):08x}" for name, array in tensors.items()}
    told = {
        "lowbit.version": "1",
        "lowbit.tree": json.dumps(tree),
        "lowbit.crc32": json.dumps(sums if crc32 is None else crc32),
    }
    header: dict[str, Any] = {"__metadata__": told | {"lowbit.metadata": "{}"} | (texts or {})}
    end = 0
    for name, array in {**tensors, "lowbit.sha256": np.zeros(32, np.uint8)}.items():
        start, end = end, end + array.nbytes
        kind = _dtypes.NAMES[array.dtype]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    for name, changes in (entries or {}).items():
        header[name] = header.get(name, {}) | changes if isinstance(changes, dict) else changes
    header["__metadata__"] = {name: text for name, text in header["__metadata__"].items() if text is not None}
    path = folder / "forged.safetensors"
    written = json.dumps(header, separators=(",", ":")).encode()
    assert replace[0] in written
    path.write_bytes(signed(written.replace(*replace) if replace[0] else written, data))
    return path


def deep(depth: int) -> str:
    return '["list",[[0,' * depth + "null" + "]]]" * depth


W = "tensor 'w/codes'"
NF4 = {"parts": {**COMPONENTS, "group_absmax": None, "offset": None}, "spans": [64]}
FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "newer": ({"texts": {"lowbit.version": "3"}}, "a lowbit file of version 3, and this lowbit reads versions 1 and 2"),
    "no index": ({"texts": {"lowbit.version": "2"}}, "its metadata must be the texts .*, lowbit.files, lowbit.pieces"),
    "version 0": ({"texts": {"lowbit.version": "0"}}, "version 0"),
    "version text": ({"texts": {"lowbit.version": "one"}}, "is not a lowbit file"),
    "version number": ({"texts": {"lowbit.version": 1}}, "is not a lowbit file"),
    "no tree": ({"texts": {"lowbit.tree": None}}, "its metadata must be the texts lowbit.version, lowbit.tree"),
    "more texts": ({"texts": {"more": ""}}, "its metadata must be the texts"),
    "tree of its own": ({"texts": {"lowbit.tree": {}}}, "its metadata must be the texts"),
    "metadata": ({"texts": {"lowbit.metadata": "[1]"}}, "lowbit.metadata has JSON that is not an object"),
    "metadata truncated": ({"texts": {"lowbit.metadata": '{"a":'}}, "lowbit.metadata has JSON that cannot be read"),
    "metadata duplicate": ({"texts": {"lowbit.metadata": '{"a":1,"a":2}'}}, "lowbit.metadata .*'a' is a duplicate key"),
    "metadata deep": ({"texts": {"lowbit.metadata": '{"a":' + "[" * 9999}}, "lowbit.metadata has JSON"),
    "long number": ({"texts": {"lowbit.metadata": '{"a":' + "9" * 5000 + "}"}}, "lowbit.metadata has JSON"),
    "tree truncated": ({"texts": {"lowbit.tree": "["}}, "lowbit.tree has JSON that cannot be read"),
    "tree closed": ({"texts": {"lowbit.tree": 'null,"tree":null'}}, "lowbit.tree .*'tree' is a duplicate key"),
    "tree more": ({"texts": {"lowbit.tree": 'null,"more":null'}}, "tensor 'w/codes' belongs to no array"),
    "tree half": ({"texts": {"lowbit.tree": "\ud800"}}, "lowbit.tree has JSON that cannot be read"),
    "header": ({"replace": (b'"w/codes"', b'"w/codes')}, "its header has JSON that cannot be read"),
    "bytes": ({"replace": (b'"w/codes":', b'"w/c\xff\xff\xffs":')}, "its header has JSON that cannot be read"),
    "same tensor": ({"replace": (b'"w/scales":', b'"w/codes":')}, "its header .*'w/codes' is a duplicate key"),
    "entry": ({"entries": {"w/codes": 5}}, f"{W} is 5, and not a dtype, a shape"),
    "entry null": ({"entries": {"w/codes": None}}, f"{W} is None, and not a dtype, a shape"),
    "entry more": ({"entries": {"w/codes": {"more": 1}}}, f"{W} is .*and not a dtype, a shape"),
    "dtype": ({"entries": {"w/codes": {"dtype": "F4"}}}, f"{W} has the dtype 'F4', which is not one of BOOL, U8"),
    "dtype number": ({"entries": {"w/codes": {"dtype": 5}}}, f"{W} is .*and not a dtype"),
    "shape text": ({"entries": {"w/codes": {"shape": "32"}}}, f"{W} is .*and not a dtype, a shape"),
    "shape negative": ({"entries": {"w/codes": {"shape": [-4, -8]}}}, rf"{W} has the shape \[-4, -8\]"),
    "shape float": ({"entries": {"w/codes": {"shape": [4.0, 8]}}}, rf"{W} has the shape \[4.0, 8\]"),
    "shape flag": ({"entries": {"w/codes": {"shape": [True, 32]}}}, rf"{W} has the shape \[True, 32\]"),
    "shape large": ({"entries": {"w/codes": {"shape": [2**32, 2**32]}}}, rf"{W} has the shape \[42949"),
    "shape around": ({"entries": {"w/codes": {"shape": [2**64 + 4, 8]}}}, rf"{W} has the shape \[18446"),
    "shape very large": ({"entries": {"w/codes": {"shape": [10**4000]}}}, rf"{W} has the shape \[1000"),
    "shape empty and large": ({"entries": {"w/codes": {"shape": [0, 2**41]}}}, rf"{W} has the shape \[0, 21"),
    "shape of many axes": ({"entries": {"w/codes": {"shape": [1] * 65}}}, rf"{W} has the shape"),
    "shape too small": (
        {"entries": {"w/codes": {"shape": [4, 7]}}},
        rf"{W} of shape \[4, 7\] has the offsets \[0, 32\]",
    ),
    "shape too large": (
        {"entries": {"w/codes": {"shape": [4, 9]}}},
        rf"{W} of shape \[4, 9\] has the offsets \[0, 32\]",
    ),
    "offsets": ({"entries": {"w/codes": {"data_offsets": [0]}}}, rf"{W} of shape .* has the offsets \[0\]"),
    "offsets negative": (
        {"entries": {"w/codes": {"data_offsets": [-32, 0]}}},
        rf"{W} of shape .* has the offsets \[-32, 0\]",
    ),
    "offsets float": (
        {"entries": {"w/codes": {"data_offsets": [0.0, 32]}}},
        rf"{W} of shape .* has the offsets \[0.0, 32\]",
    ),
    "offsets flag": (
        {"entries": {"w/codes": {"data_offsets": [False, 32]}}},
        rf"{W} of shape .* has the offsets \[False",
    ),
    "overlap": (
        {"entries": {"w/scales": {"data_offsets": [16, 32]}}},
        r"tensor 'w/scales' .* has the offsets \[16, 32\]",
    ),
    "gap": ({"entries": {"w/scales": {"data_offsets": [33, 49]}}}, r"tensor 'w/scales' .* has the offsets \[33, 49\]"),
    "beyond": (
        {"entries": {"w/scales": {"data_offsets": [2**40, 2**40 + 16]}}},
        "tensor 'w/scales' .* has the offsets",
    ),
    "wrapped": ({"entries": {"w/scales": {"data_offsets": [2**64 + 32, 48]}}}, "tensor 'w/scales' .* has the offsets"),
    "no digest": ({"entries": {"lowbit.sha256": {"shape": [31], "data_offsets": [48, 79]}}}, "ends at byte .* has"),
    "more tensors": ({"entries": {"x": {"dtype": "U8", "shape": [0], "data_offsets": [80, 80]}}}, "lowbit.crc32 .*'x'"),
    "checksum missing": ({"crc32": {"w/codes": "0" * 8}}, r"lowbit.crc32 does not list the tensors .*\['w/scales'\]"),
    "checksum more": ({"crc32": dict.fromkeys([*TENSORS, "x"], "0" * 8)}, "lowbit.crc32 does not list the tensors"),
    "checksum order": ({"crc32": dict.fromkeys(["w/scales", "w/codes"], "0" * 8)}, "lowbit.crc32 does not list"),
    "checksum number": ({"crc32": dict.fromkeys(TENSORS, 0)}, f"{W} has the checksum 0, which is not eight"),
    "checksum short": ({"crc32": dict.fromkeys(TENSORS, "0")}, f"{W} has the checksum '0', which is not eight"),
    "checksum list": ({"crc32": []}, "lowbit.crc32 has JSON that is not an object"),
    "checksum": ({"crc32": dict.fromkeys(TENSORS, "0" * 8)}, f"{W} is damaged: its bytes do not match its checksum"),
    "leaf": ({"tree": one(5)}, "'w' is 5, which is not an array, a number or a container"),
    "leaf text": ({"tree": one("w/codes")}, "'w' is 'w/codes', which is not an array"),
    "leaf empty": ({"tree": one({})}, "'w' is {}, which is not an array"),
    "leaf more": ({"tree": one({"array": "w/codes", "more": 1})}, "'w' is .*which is not an array"),
    "leaf list": ({"tree": one({"array": ["w/codes"]})}, "'w' is .*which is not an array"),
    "int": ({"tree": one({"int": 5})}, "'w' is {'int': 5}, which is not an array, a number"),
    "int text": ({"tree": one({"int": "1_0"})}, "'w' is {'int': '1_0'}, which is not an array, a number"),
    "int long": ({"tree": one({"int": "9" * 5000})}, "'w' is {'int': '9999.*, which is not an array, a number"),
    "float": ({"tree": one({"float": "1e999"})}, "'w' is {'float': '1e999'}, which is not an array, a number"),
    "bool": ({"tree": one({"bool": "true"})}, "'w' is {'bool': 'true'}, which is not an array, a number"),
    "complex": ({"tree": one({"complex": "1"})}, "'w' is {'complex': '1'}, which is not an array, a number"),
    "kind of number": ({"tree": one({"eval": "1"})}, "'w' is {'eval': '1'}, which is not an array, a number"),
    "text number": ({"tree": one({"str": 5})}, "'w' is {'str': 5}, which is not an array, a number"),
    "children": ({"tree": ["dict", {"w": None}]}, "the tree is .*which is not an array, a number or a container"),
    "kind": ({"tree": [5, []]}, "the tree is .*which is not an array, a number or a container"),
    "child": ({"tree": ["dict", ["w"]]}, "the tree has the child 'w', which has no key of its own"),
    "child more": ({"tree": ["dict", [["w", None, None]]]}, "the tree has the child .*, which has no key"),
    "key null": ({"tree": ["dict", [[None, None]]]}, "the tree has the child .*, which has no key"),
    "key flag": ({"tree": ["dict", [[True, None]]]}, "the tree has the child .*, which has no key"),
    "key float": ({"tree": ["dict", [[1.5, None]]]}, "the tree has the child .*, which has no key"),
    "same key": ({"tree": ["dict", [["w", None], ["w", None]]]}, r"has the child \['w', None\], which has no key of"),
    "half a key": ({"tree": ["dict", [["\ud800", None]]]}, "has an unpaired surrogate in its key"),
    "list key": ({"tree": ["list", [["w", None]]]}, "'w' is item 0 of a list"),
    "list order": ({"tree": ["tuple", [[1, None], [0, None]]]}, "'1' is item 0 of a tuple"),
    "deep": ({"texts": {"lowbit.tree": deep(66)}}, "'0/0/.*' is .*which is not an array, a number or a container"),
    "very deep": ({"texts": {"lowbit.tree": deep(20_000)}}, "lowbit.tree has JSON that cannot be read"),
    "missing": ({"tree": one({"array": "x"})}, "'w' needs tensor 'x', which is missing"),
    "the checksum itself": ({"tree": one({"array": "lowbit.sha256"})}, "'w' needs tensor 'lowbit.sha256', which is mi"),
    "unused": ({"tree": one({"array": "w/codes"})}, "tensor 'w/scales' belongs to no array"),
    "missing component": (
        {"tree": one(quantized(parts=COMPONENTS | {"scales": "x"}))},
        "'w' needs tensor 'x', which is missing",
    ),
    "component number": (
        {"tree": one(quantized(parts=COMPONENTS | {"scales": 5}))},
        "'w' needs tensor 5, which is missing",
    ),
    "component list": (
        {"tree": one(quantized(parts=COMPONENTS | {"scales": []}))},
        r"'w' needs tensor \[\], which is missing",
    ),
    "no component": ({"tree": one(quantized(parts=COMPONENTS | {"scales": None}))}, "'w' is not a valid Array8B: "),
    "no codes": ({"tree": one(quantized(parts=COMPONENTS | {"codes": None}))}, r"'w' has the spans \(0,\) on 0 axes"),
    "index": ({"tree": one(quantized(parts=COMPONENTS | {"index": "w/codes"}))}, "'w' is not a valid Array8B"),
    "class": ({"tree": one(quantized("Array9B"))}, "'w' is of the class 'Array9B': import the module that defines"),
    "class of Python": ({"tree": one(quantized("os.system"))}, "'w' is of the class 'os.system': import"),
    "class of all": ({"tree": one(quantized("QuantizedArray"))}, "'w' is of the class 'QuantizedArray': import"),
    "field": ({"tree": one(quantized(more=1))}, r"'w' has other fields than the class Array8B: \['more'\]"),
    "other class": (
        {"tree": one(quantized("ArrayNF4"))},
        r"has other fields than the class ArrayNF4: \['group_absmax', 'offset'\]",
    ),
    "dtype null": ({"tree": one(quantized(dtype=None))}, r"'w' has \(None, False, True, 'exact'\) for dtype"),
    "dtype text": ({"tree": one(quantized(dtype="F32"))}, r"'w' has \('F32', False, True, 'exact'\) for dtype"),
    "dtype unknown": ({"tree": one(quantized(dtype={"dtype": "O"}))}, "'w' has {'dtype': 'O'} in a static field"),
    "dtype more": ({"tree": one(quantized(dtype={"dtype": "F32", "x": 1}))}, "'w' has .* in a static field"),
    "transposed": ({"tree": one(quantized(transposed=1))}, "for dtype, transposed, use_kernel and compute"),
    "use_kernel": ({"tree": one(quantized(use_kernel="no"))}, "for dtype, transposed, use_kernel and compute"),
    "compute": ({"tree": one(quantized(compute="slow"))}, "for dtype, transposed, use_kernel and compute"),
    "compute list": ({"tree": one(quantized(compute=[]))}, "for dtype, transposed, use_kernel and compute"),
    "spans number": ({"tree": one(quantized(spans=0))}, "'w' has the spans 0 on 2 axes"),
    "spans text": ({"tree": one(quantized(spans=["0"]))}, r"'w' has the spans \('0',\) on 2 axes"),
    "spans flag": ({"tree": one(quantized(spans=[False]))}, r"'w' has the spans \(False,\) on 2 axes"),
    "spans float": ({"tree": one(quantized(spans=[8.0]))}, r"'w' has the spans \(8.0,\) on 2 axes"),
    "spans negative": ({"tree": one(quantized(spans=[-8]))}, r"'w' has the spans \(-8,\) on 2 axes"),
    "spans too many": ({"tree": one(quantized(spans=[1, 1, 0]))}, r"'w' has the spans \(1, 1, 0\) on 2 axes"),
    "spans large": ({"tree": one(quantized(spans=[2**62]))}, r"'w' has the spans \(46116.*,\) on 2 axes"),
    "spans very large": ({"tree": one(quantized(spans=[10**4000]))}, r"'w' has the spans \(1000.* on 2 axes"),
    "spans wrong": (
        {"tree": one(quantized(spans=[4]))},
        "'w' is not a valid Array8B: The components of this Array8B no longer fit",
    ),
    "spans none": (
        {"tree": one(quantized(spans=[]))},
        "'w' is not a valid Array8B: The components of this Array8B no longer fit",
    ),
    "lengths number": ({"tree": one(quantized(lengths=8))}, "'w' has the lengths 8 on 2 axes"),
    "lengths flat": ({"tree": one(quantized(lengths=[-1, 8]))}, r"'w' has the lengths \(-1, 8\) on 2 axes"),
    "lengths triple": ({"tree": one(quantized(lengths=[[-1, 8, 0]]))}, r"'w' has the lengths \(\(-1, 8, 0\),\)"),
    "lengths text": ({"tree": one(quantized(lengths=[["-1", 8]]))}, "'w' has the lengths"),
    "lengths negative": ({"tree": one(quantized(lengths=[[-1, -8]]))}, "'w' has the lengths"),
    "lengths axis": ({"tree": one(quantized(lengths=[[-3, 8]]))}, "'w' has the lengths"),
    "lengths duplicate": ({"tree": one(quantized(lengths=[[-1, 8], [-1, 8]]))}, "'w' has the lengths"),
    "lengths wrong": (
        {"tree": one(quantized(lengths=[[-1, 9]]))},
        "'w' is not a valid Array8B: The components .* of 9",
    ),
    "lengths large": ({"tree": one(quantized(lengths=[[-1, 10**4000]]))}, "'w' is not a valid Array8B: The components"),
    "rank": ({"tensors": TENSORS | {"w/scales": SCALES[:, 0]}}, "'w' is not a valid Array8B: .*same number of axes"),
    "scales": ({"tensors": TENSORS | {"w/scales": SCALES[:3]}}, "'w' is not a valid Array8B: .*no longer fit"),
    "kind of 1 bit": ({"tree": one(quantized("Array1B", kind="octal"))}, "'w' is not a valid Array1B: 'octal'"),
    "kind list": ({"tree": one(quantized("Array1B", kind=[]))}, "'w' is not a valid Array1B"),
    "floats for codes": (
        {"tree": one(quantized("ArrayNF4", **NF4)), "tensors": TENSORS | {"w/codes": np.ones((4, 32), np.float32)}},
        "'w' is not a valid ArrayNF4: The codes of this ArrayNF4 are float32",
    ),
    "integers for scales": (
        {"tensors": TENSORS | {"w/scales": SCALES.astype(np.int32)}},
        "'w' is not a valid Array8B: The scales of this Array8B are int32, and the format stores float32",
    ),
    "groups": (
        {
            "tree": one(quantized("ArrayNF4", **NF4 | {"parts": NF4["parts"] | {"group_absmax": "g", "offset": "o"}})),
            "tensors": {"w/codes": np.ones((4, 32), np.uint8), "w/scales": np.ones((4, 1), np.uint8)}
            | {"g": np.ones((2, 5), np.float32), "o": np.ones((1, 1), np.float32)},
        },
        "'w' is not a valid ArrayNF4: ",
    ),
    "flags": (
        {
            "tree": one({"array": "b"}),
            "tensors": {"b": np.array([0, 2], np.uint8)},
            "entries": {"b": {"dtype": "BOOL"}},
        },
        "tensor 'b' has bytes that are neither 0 nor 1",
    ),
    "index that fits": (
        {
            "tree": one(quantized(parts=COMPONENTS | {"index": "i"})),
            "tensors": {
                "w/codes": np.stack([CODES] * 2),
                "w/scales": np.stack([SCALES] * 2),
                "i": np.zeros(2, np.int32),
            },
        },
        "'w' is not a valid Array8B of stored shape",
    ),
    "vector stored transposed": (
        {"tree": one(quantized(transposed=True)), "tensors": {"w/codes": CODES[0], "w/scales": SCALES[0]}},
        "'w' is not a valid Array8B: This Array8B is stored transposed",
    ),
}


def test_a_forged_file_with_consistent_contents_is_read(tmp_path):
    tree = reads(forged(tmp_path, one(quantized())))[1]
    assert_same(tree, {"w": Array8B(weight=CODES, scale=SCALES)})


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_raises_one_error(case, tmp_path):
    contents, message = FORGED[case]
    path = forged(tmp_path, **{"tree": one(quantized()), **contents})
    error, peak = refused(path)
    assert re.search(f"forged.safetensors.*{message}", error, re.DOTALL), error
    assert len(error) < 2000
    assert peak < 2 * path.stat().st_size + (1 << 22)


def test_names_that_would_fill_the_memory_are_refused(tmp_path):
    leaves = ["list", [[i, {"array": "w"}] for i in range(2000)]]
    path = forged(tmp_path, ["dict", [["x" * 200_000, leaves]]], {"w": CODES})
    error, peak = refused(path)
    assert "have names that are longer than the header" in error and len(error) < 2000
    assert peak < 64 * path.stat().st_size


def test_many_equal_names_are_numbered(tmp_path):
    children = [[f"{'a/' * i}a", one({"array": "w"})] for i in range(3)]
    many = [[f"k{i}", ["dict", [["a/w", {"array": "w"}], ["a", one({"array": "w"})]]]] for i in range(500)]
    file = LowbitFile(forged(tmp_path, ["dict", children + many], {"w": CODES}))
    assert len(file) == 1003 and "k499/a/w~2" in file


def test_values_that_would_fill_the_memory_are_refused_before_they_are_made(tmp_path):
    path = forged(tmp_path, [], texts={"lowbit.metadata": '{"a":[' + "[]," * 2_000_000 + "[]]}"})
    error, peak = refused(path)
    assert re.search("forged.safetensors: its header has JSON of 400.* values", error)
    assert peak < 4 * path.stat().st_size


def test_a_header_that_is_too_large_is_neither_written_nor_read(tmp_path, monkeypatch):
    path = saved(tmp_path, [1, 2, 3])
    monkeypatch.setattr(_header, "_MOST_HEADER", 200)
    with pytest.raises(ValueError, match=r"a.safetensors is not a safetensors file, or is truncated: .* would end"):
        load(path)
    with pytest.raises(ValueError, match=r"a.safetensors: its header has .* bytes, more than 200"):
        save(path, [1, 2, 3])


def test_nothing_in_a_file_is_imported(tmp_path):
    before = set(sys.modules)
    path = forged(tmp_path, ["antigravity.Container", [["w", quantized()]]])
    with pytest.raises(ValueError, match=r"is of the class 'antigravity.Container'"):
        load(path)
    assert "antigravity" not in sys.modules and not {n for n in set(sys.modules) - before if "lowbit" not in n}
