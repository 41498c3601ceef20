"""From one kind of file to another, tensor by tensor, quantizing on the way or keeping what is stored."""

import dataclasses
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from lowbit.axes import axes_by_name
from lowbit.formats import QuantizedArray
from lowbit.report import Report, Row
from lowbit.tree import Plan, Rules, ordered_rules, plan, quantized, row

from ._atomic import put_in_place, replaceable, written_aside
from ._writing import check_is_file
from .bitsandbytes import bitsandbytes_tensors, quantization_config
from .gguf import GGUFField, GGUFFile, without_types
from .gguf_writer import write_gguf
from .source import LowbitDir, Tensors, is_stored
from .stream import Note, Progress, streamed
from .tensors import WEIGHTS, HuggingFaceDir

# What can be written: our own files, bitsandbytes' layout of NF4, dense safetensors, GGUF.
TARGETS = ("lowbit", "bitsandbytes", "safetensors", "gguf")
_FILE_TYPES = {"F16": 1, "Q8_0": 7}  # what llama.cpp calls a file by most of its tensors
# Types that read as another dtype than float32.
_DTYPES: dict[str, Any] = {"F64": np.float64, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_}
_DTYPES |= {f"{letter}{8 * n}": f"{letter.lower()}{n}" for letter in "IU" for n in (1, 2, 4, 8)}


def target_of(path: Path) -> str:
    """The kind of file that a name asks for."""
    return "gguf" if path.suffix == ".gguf" else "lowbit"


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise before any work is done, if the target cannot be written or must not be."""
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise ValueError(f"{target} is the source itself. Give another name for the result.")
    if target.exists() and not force:
        raise ValueError(f"{target} exists. --force replaces it.")
    if target.is_dir() != source.is_dir() and target.exists():
        raise ValueError(f"{target} is {'a directory' if target.is_dir() else 'a file'}, and {source} is not.")
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"There is no directory {folder} to write {target.name} to.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"The directory {folder} cannot be written to.")


def plans_for(
    source: Tensors, rules: Rules, *, strict: bool, linear_only: bool = False
) -> tuple[dict[str, Plan], tuple[str, ...]]:
    """What the rules mean for each tensor of a file, and the patterns that matched none.

    What is stored in a format of ours is kept as it is, unless a rule other than the default asks for another. With
    `linear_only` the same holds for embeddings: bitsandbytes has them dense.
    """
    ordered = ordered_rules(rules)
    structs = {name: jax.ShapeDtypeStruct(source.shape(name), _dtype(source.type(name))) for name in source}
    plans, unmatched = plan(ordered, [(name, struct, None) for name, struct in structs.items()], strict=strict)
    found = dict(zip(structs, plans, strict=True))
    for name, struct in structs.items():
        rule = next((rule for rule in ordered if rule.matches(name, struct)), None)
        if rule is not None and not rule.is_default:
            continue
        if is_stored(source.type(name)):
            found[name] = Plan(None, f"stored as {source.type(name)} already")
        elif linear_only and "embedding" in axes_by_name(name, struct.shape).how:
            found[name] = Plan(None, "an embedding, which bitsandbytes keeps dense")
    return found, unmatched


def transformed(source: Tensors, plans: dict[str, Plan]) -> Iterator[tuple[str, Any, Row]]:
    """Each tensor as planned, whole, with its row of the report."""
    for name in source:
        planned = plans[name]
        error = None
        if planned.config is None:
            array = source.array(name)
        else:
            dense = source.dense(name) if is_stored(source.type(name)) else source.array(name)
            array, error = quantized(name, np.asarray(dense), planned.config)
        found = row(name, array, array, planned, error)
        yield name, array, dataclasses.replace(found, dtype=source.type(name), before=source.nbytes(name))


def convert(
    source: Tensors,
    target: Path,
    *,
    rules: Rules = (),
    to: str | None = None,
    type: str = "F16",
    requantize: bool = False,
    strict: bool = False,
    progress: Progress = lambda done, total: None,
    note: Note = lambda text: None,
) -> Report:
    """Write the tensors of a file or a directory to another, with what belongs to them; a report on each.

    - `rules`: what to quantize on the way, as for `quantize_tree`; none keeps everything as it is stored.
    - `to`: one of `TARGETS`; default GGUF for a name that ends in .gguf, else a file of ours.
    - `type`: of the matrices in a GGUF file, F16 or Q8_0.
    - `requantize`: let a layout that cannot hold an array as it is have it quantized again.
    - `progress`: told the bytes of the source that are done, and those that there are.
    - `note`: told in a sentence that earlier work goes on, or does not.

    A directory becomes a directory: its other files are copied. Files of ours are written piece by piece, and go on
    where they were if that is interrupted; other kinds are made in memory.
    """
    to = to or target_of(target)
    if to not in TARGETS:
        raise ValueError(f"Unknown kind of file {to!r}: it must be one of {', '.join(TARGETS)}.")
    _check_method(source)
    plans, unmatched = plans_for(source, rules, strict=strict, linear_only=to == "bitsandbytes")
    is_directory = isinstance(source, HuggingFaceDir | LowbitDir)
    if to == "lowbit":
        if not is_directory:
            check_is_file(target)
        metadata = {} if is_directory else _metadata(source)
        with streamed(source, plans, target, metadata=metadata, progress=progress, note=note) as (part, rows):
            if is_directory:
                with _directory_aside(target) as folder:
                    _copy_others(source, folder)
                    os.replace(part, folder / WEIGHTS)
            else:
                put_in_place(part, replaceable(target))
        return Report(tuple(rows), unmatched)
    rows = []

    def tensors() -> Iterator[tuple[str, Any]]:
        done, total = 0, sum(map(source.nbytes, source))
        for name, array, found in transformed(source, plans):
            rows.append(found)
            yield name, array
            progress(done := done + found.before, total)

    if is_directory:
        _write_directory(source, target, to, tensors(), requantize)
    elif to == "gguf":
        kind = checked_type(type)
        fields = {**_gguf_fields(source), "general.file_type": GGUFField("UINT32", _FILE_TYPES[kind])}
        write_gguf(target, dict(tensors()), fields, type=kind)
    else:
        _write_safetensors(target, _other_layout(to, tensors(), requantize))
    return Report(tuple(rows), unmatched)


def _copy_others(source: HuggingFaceDir | LowbitDir, folder: Path) -> None:
    for file in source.other_files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / file, folder / file)


def _write_directory(
    source: HuggingFaceDir | LowbitDir, target: Path, to: str, tensors: Iterator[tuple[str, Any]], requantize: bool
) -> None:
    if to == "gguf":
        raise ValueError(f"{source.path} is a directory, which cannot become a GGUF file: its fields are not there.")
    with _directory_aside(target) as folder:
        _copy_others(source, folder)
        stored = _other_layout(to, tensors, requantize)
        _write_safetensors(folder / WEIGHTS, stored)
        if to == "bitsandbytes":
            config = dict(source.metadata.get("config") or {})
            nested = any(name.endswith(".nested_absmax") for name in stored)
            config["quantization_config"] = quantization_config(double_quant=nested)
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _other_layout(to: str, tensors: Iterator[tuple[str, Any]], requantize: bool) -> dict[str, np.ndarray]:
    """Tensors as other libraries have them."""
    stored: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if to == "bitsandbytes" and isinstance(array, QuantizedArray):
            stored |= bitsandbytes_tensors(name, array, requantize=requantize)
        else:
            stored[name] = np.asarray(array.materialize() if isinstance(array, QuantizedArray) else array)
    return stored


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    with written_aside(path) as aside:
        save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, aside, {"format": "pt"})


@contextmanager
def _directory_aside(target: Path) -> Iterator[Path]:
    """A new directory that takes the place of `target` when the block ends, and is gone if it fails."""
    target = target.absolute()
    aside, old = (target.parent / f".lowbit-{secrets.token_hex(8)}.{end}" for end in ("part", "old"))
    aside.mkdir()
    try:
        yield aside
        if target.exists():
            os.replace(target, old)
        os.replace(aside, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.replace(old, target)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _check_method(source: Tensors) -> None:
    """Other methods store integers that mean nothing without them."""
    config = source.metadata.get("config")
    method = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(method, dict) and (method.get("quant_method") != "bitsandbytes" or method.get("load_in_8bit")):
        name = "bitsandbytes in 8 bits" if method.get("load_in_8bit") else method.get("quant_method")
        raise ValueError(f"{source.path} was quantized by {name}, which cannot be read; bitsandbytes' NF4 can.")


def _metadata(source: Tensors) -> dict[str, Any]:
    """What a file of ours remembers of the file it came from."""
    if not isinstance(source, GGUFFile):
        return dict(source.metadata)
    return {"gguf": {key: _listed(field) for key, field in source.fields.items()}}


def _gguf_fields(source: Tensors) -> dict[str, GGUFField]:
    """The fields of a GGUF file, from itself or from a file of ours that came from one."""
    if isinstance(source, GGUFFile):
        return source.fields
    listed = source.metadata.get("gguf")
    if not isinstance(listed, dict):
        raise ValueError(f"{source.path} does not come from a GGUF file, and so lacks the fields that one must have.")
    return {key: _field(field) for key, field in listed.items()}


def plain_fields(listed: Any) -> dict[str, Any] | None:
    """The values of GGUF fields that a file of ours remembers, without their types."""
    if not isinstance(listed, dict):
        return None
    return {key: without_types(_field(field)) for key, field in listed.items()}


def _listed(field: GGUFField) -> list[Any]:
    """A field as JSON has it: its type and its value."""
    return [field.type, [_listed(f) for f in field.value] if field.type == "[ARRAY]" else field.value]


def _field(listed: Any) -> GGUFField:
    if not isinstance(listed, list) or len(listed) != 2 or not isinstance(listed[0], str):
        raise ValueError(f"{listed!r:.80} is no field of a GGUF file: it must be a type and a value.")
    kind, value = listed
    return GGUFField(kind, [_field(f) for f in value] if kind == "[ARRAY]" else value)


def _dtype(kind: str) -> Any:
    """The dtype that tensors of a type read as; types that are decoded read as float32."""
    return np.dtype(_DTYPES.get(kind, np.float32))


def checked_type(type: str) -> Literal["F16", "Q8_0"]:
    """A type that matrices can have in a GGUF file that we write."""
    if type == "F16" or type == "Q8_0":
        return type
    raise ValueError(f"Unknown type {type!r} for a GGUF file: it must be F16 or Q8_0.")


def compared(a: Tensors, b: Tensors, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """How far each tensor of `b` is from that of `a`: |b - a| / |a|, and the largest difference."""
    for name in names:
        if a.shape(name) != b.shape(name):
            yield {"name": name, "shape": a.shape(name), "other": b.shape(name), "error": math.inf, "largest": math.inf}
            continue
        x, y = a.dense(name).astype(np.float32), b.dense(name).astype(np.float32)
        difference, size = np.abs(y - x), float(np.linalg.norm(x.ravel()))
        norm = float(np.linalg.norm(difference.ravel()))
        error = norm / size if size else (0.0 if norm == 0 else math.inf)
        largest = float(difference.max(initial=0))
        yield {"name": name, "shape": a.shape(name), "other": b.shape(name), "error": error, "largest": largest}
