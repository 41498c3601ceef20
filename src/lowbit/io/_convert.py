"""Convert a file or a directory to another kind, quantizing its tensors or keeping their stored bits."""

import dataclasses
import functools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from lowbit.config import QuantizationConfig, quantize, quantize_calibrated
from lowbit.formats import FORMATS, PermutedArray, QuantizedArray
from lowbit.formats.moments import Moments
from lowbit.models.axes import axes_by_name
from lowbit.models.patterns import Rules, naming, ordered_rules
from lowbit.models.plan import Plan, plan
from lowbit.models.report import NO_STATISTIC, NOT_CALIBRATED, Outputs, Report, Row, array_bytes, calibrated_by

from ._atomic import atomic_write, put_in_place, replaceable
from ._checks import OptionNeeded
from ._compare import compared
from ._directory import WEIGHTS, check_names, check_place, discard, finish, is_pending, staged
from ._dtypes import DTYPES, dense_dtype
from ._gguf_blocks import BLOCK_TYPES, type_of
from .checkpoints.writing import WRITERS, Facts, checkpoint_tensors
from .container._layout import Layout, check_is_file
from .gguf_writer import file_type, write_gguf
from .readers import GGUFFile, HuggingFaceDir, LowbitDir, Reader, open_tensors
from .readers._base import check_method, decoded_types, is_stored
from .readers.gguf import GGUFField, without_types
from .streaming import Note, Progress, Work, locked, staging_path, streamed

# The kinds of files that can be written: lowbit files, those of other projects, dense safetensors, GGUF.
TARGETS = ("lowbit", *WRITERS, "safetensors", "gguf")
_HOLDS = {name: writer.holds for name, writer in WRITERS.items()} | {
    "safetensors": "a safetensors file of other libraries holds dense tensors",
    "gguf": f"a GGUF file holds dense tensors as F16 or Q8_0, and its own layouts ({', '.join(BLOCK_TYPES)})",
}
_GGUF_FORMATS = {name for kind, row in BLOCK_TYPES.items() for name in (kind, row.format)}


def default_format(to: str | None) -> str:
    """The format that weights are quantized to if none is given: one that the target holds."""
    return WRITERS[to].default if to in WRITERS else "q4"


def target_of(path: Path) -> str:
    """The kind of file for a name: GGUF if it ends in .gguf, else a lowbit file."""
    return "gguf" if path.suffix == ".gguf" else "lowbit"


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise before any work is done if the target cannot be written, or exists and `force` is not set."""
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise ValueError(f"{target} is the source itself. Give another name for the result.")
    if source.is_dir() or target.is_dir():
        check_place(source, target)
    if target.is_dir() != source.is_dir() and target.exists():
        raise ValueError(f"{target} is {'a directory' if target.is_dir() else 'a file'}, and {source} is not.")
    if target.exists() and not force:
        does = "replaces the files in it that lowbit wrote" if target.is_dir() else "replaces it"
        raise OptionNeeded(f"{target} exists.", "force", does)
    folder = target.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"There is no directory {folder} to write {target.name} to.")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"The directory {folder} cannot be written to.")


def plans_for(
    source: Reader, rules: Rules, *, strict: bool, linear_only: bool = False, requantize: bool = False
) -> tuple[dict[str, Plan], tuple[str, ...]]:
    """The plan for each tensor of a file, and the patterns that matched none.

    A tensor that is stored in a lowbit format is kept, unless a pattern other than the default asks for another format,
    or `requantize` lets the default do so. With `linear_only` embeddings are kept too, as the target keeps
    them dense.
    """
    ordered = ordered_rules(rules)
    structs = {name: jax.ShapeDtypeStruct(source.shape(name), dense_dtype(source.type(name))) for name in source}
    plans, unmatched = plan(ordered, [(name, struct, None) for name, struct in structs.items()], strict=strict)
    found = dict(zip(structs, plans, strict=True))
    for name, struct in structs.items():
        rule = next((rule for rule in ordered if rule.matches(name, struct)), None)
        if rule is not None and not rule.is_default:
            continue
        stored, config = source.type(name), found[name].config
        if is_stored(stored) and (config is None or not requantize or config.dtype == stored):
            found[name] = Plan(None, f"stored as {stored} already")
        elif linear_only and not is_stored(stored) and "embedding" in axes_by_name(name, struct.shape).how:
            found[name] = Plan(None, "an embedding, which the target keeps dense")
    return found, unmatched


def transformed(
    source: Reader, plans: dict[str, Plan], calibration: Mapping[str, Moments] | None = None
) -> Iterator[tuple[str, Any, Outputs]]:
    """Each tensor as planned, loaded whole, and what calibration did to it; calibrated ones last, in their order."""
    known = [name for name in calibration or () if name in source and plans[name].config is not None]
    for name in [*(name for name in source if name not in {*known}), *known]:
        config = plans[name].config
        if config is None:
            yield name, source.array(name), NOT_CALIBRATED
            continue
        dense = np.asarray(source.dense(name) if is_stored(source.type(name)) else source.array(name))
        with naming(name):
            if calibration is None or name not in {*known}:
                array, outputs = quantize(dense, config), NOT_CALIBRATED if calibration is None else NO_STATISTIC
            else:
                moments = calibration[name]
                found = quantize_calibrated(jnp.asarray(dense), config, moments)
                array = found.array
                outputs = calibrated_by(float(found.before), float(found.after), moments.hessian is not None)
        yield name, array, outputs


def convert(
    source: Reader | str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    rules: Rules = (),
    to: str | None = None,
    type: str = "F16",
    requantize: bool = False,
    dequantize: bool = False,
    strict: bool = False,
    calibration: Mapping[str, Moments] | None = None,
    progress: Progress = lambda done, total: None,
    note: Note = lambda text: None,
) -> Report:
    """Write the tensors of a file or a directory to another; returns a report on the file that was written.

    - `source`: a path, or a reader.
    - `rules`: which tensors to quantize, as for `quantize_tree`; none keeps the stored bits of all.
    - `to`: `"lowbit"`, `"bitsandbytes"`, `"compressed-tensors"`, `"mlx"`, `"safetensors"` (dense) or `"gguf"`. Default:
      GGUF for a name that ends in .gguf, else a lowbit file.
    - `type`: the type of dense matrices in a GGUF file, F16 or Q8_0. Tensors in a layout of GGUF keep their bits.
    - `requantize`: apply a format for all weights also to tensors that are stored in another one, and quantize again
      what bitsandbytes cannot store unchanged.
    - `dequantize`: dequantize tensors whose format the target cannot hold; otherwise they are an error.
    - `calibration`: moments of the inputs of tensors by their names, such as `Calibration.from_imatrix` reads, to
      quantize for these inputs as `quantize_tree` does.
    - `progress`: called with the number of bytes of the source that are done, and their total.
    - `note`: called with a sentence for the user, such as that an earlier run is resumed.

    A directory becomes a directory: its other files are copied. Files that lowbit did not write are not changed, and
    if one has a name that would be written, nothing is done. Lowbit files are written in chunks, and an interrupted run
    resumes; other kinds are built in memory.
    """
    source = source if isinstance(source, Reader) else open_tensors(source, strict=strict)
    target = Path(target)
    to = to or target_of(target)
    if to not in TARGETS:
        raise ValueError(f"Unknown kind of file {to!r}: it must be one of {', '.join(TARGETS)}.")
    check_method(source)
    rules = ordered_rules(rules)
    layout = _Layout(to, checked_type(type) if to == "gguf" else "F16", requantize, dequantize, calibration)
    linear_only = to in WRITERS and WRITERS[to].linear_only
    plans, unmatched = plans_for(source, rules, strict=strict, linear_only=linear_only, requantize=requantize)
    layout.check(source, target, plans)
    if decoded := decoded_types(source):
        note(decoded)
    if isinstance(source, HuggingFaceDir | LowbitDir):
        check_place(source.path, target)
        found = _write_directory(source, replaceable(target), layout, plans, progress, note)
        file = target / WEIGHTS
    else:
        found = _write_file(source, replaceable(target), layout, plans, progress, note)
        file = target
    written, size = open_tensors(target), file.stat().st_size
    found = _measured(source, written, plans, layout.outputs) if found is None else found
    rows = tuple(as_written(written, plans[row.path], row) for row in found)
    notes = _notes(rows, plans, bool(rules), requantize and to == "lowbit")
    return Report(rows, unmatched, notes=(*notes, f"{file}: {size:,} bytes on disk."), on_disk=size)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A kind of file to write: which formats it can hold, and how tensors are written to it."""

    to: str
    type: Literal["F16", "Q8_0"]
    requantize: bool
    dequantize: bool
    calibration: Mapping[str, Moments] | None = None
    outputs: dict[str, Outputs] = dataclasses.field(default_factory=dict)  # by name, of what was written

    def check(self, source: Reader, target: Path, plans: dict[str, Plan]) -> None:
        """Raise if a tensor would have a format that the target cannot hold."""
        if self.to in WRITERS and WRITERS[self.to].needs_config and not isinstance(source, HuggingFaceDir | LowbitDir):
            raise ValueError(
                f"{source.path} is a file, and {self.to} stores weights in a directory, with a config.json that says "
                "how: convert a directory."
            )
        if self.to == "lowbit" or self.dequantize:
            return
        refused: dict[str, list[str]] = {}
        for name in source:
            config, stored = plans[name].config, source.type(name)
            format = stored if config is None else str(config.dtype)
            if format not in DTYPES and not self.may_hold(format, source.shape(name), config):
                refused.setdefault(format, []).append(name)
        if refused:
            raise self.refusal(target, refused)

    def may_hold(self, format: str, shape: tuple[int, ...], config: QuantizationConfig | None) -> bool:
        if self.to in WRITERS:
            writer = WRITERS[self.to]
            if config is None:  # `holds` checks the array
                return is_stored(format)
            if writer.requantizes:
                return format in writer.formats or self.requantize
            return not writer.misfit(_quantized_like(shape, config))
        if self.to != "gguf" or format not in _GGUF_FORMATS:
            return False
        # Whether stored scales are those of GGUF depends on their numbers, which `holds` checks.
        return config is None or type_of(_quantized_like(shape, config)) is not None

    def refusal(self, target: Path, refused: Mapping[str, Sequence[str]]) -> OptionNeeded:
        found = (f"{n[0] if len(n) == 1 else f'{len(n)} tensors ({n[0]}, ...)'} as {f}" for f, n in refused.items())
        size = self.type if self.to == "gguf" else "dense ones"
        return OptionNeeded(
            f"{target} cannot hold {' and '.join(found)}: {_HOLDS[self.to]}. A lowbit file holds every format.",
            "dequantize",
            f"writes these tensors dequantized, with the error of {' and '.join(refused)} and the size of {size}",
        )

    def arrays(self, target: Path, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Tensors as the target stores them: those that it cannot hold are dequantized, if that is allowed."""
        for name, array in tensors:
            permuted = isinstance(array, PermutedArray)
            if permuted or (isinstance(array, QuantizedArray) and not self.holds(array)):
                if (permuted or self.to == "gguf") and not self.dequantize:
                    label = f"{array.array.format_label} in activation order" if permuted else array.format_label
                    raise self.refusal(target, {label or type(array).__name__: [name]})
                if permuted or self.to != "gguf":  # its writer dequantizes and rounds once
                    array = np.asarray(array.materialize())
            yield name, array

    def holds(self, array: QuantizedArray) -> bool:
        if self.to in WRITERS:
            writer = WRITERS[self.to]
            return (self.requantize and writer.requantizes) or not self.dequantize or not writer.misfit(array)
        return self.to == "gguf" and type_of(array) is not None

    def write(self, path: Path, arrays: Iterable[tuple[str, Any]]) -> dict[str, Facts]:
        """Write tensors as safetensors that other libraries read; returns what the config says of quantized ones."""
        stored: dict[str, np.ndarray] = {}
        weights: dict[str, Facts] = {}
        for name, array in arrays:
            if isinstance(array, QuantizedArray):
                tensors, weights[name] = checkpoint_tensors(self.to, name, array, requantize=self.requantize)
                stored |= tensors
            else:
                stored[name] = np.asarray(array)
        path.touch()
        mode = path.stat().st_mode  # the umask of the user; the package creates files that only their owner can read
        save_file({name: np.ascontiguousarray(x) for name, x in stored.items()}, path, {"format": "pt"})
        path.chmod(mode)
        return weights


@functools.cache
def _quantized_like(shape: tuple[int, ...], config: QuantizationConfig) -> Any:
    """The array that a matrix of a shape is quantized to, without numbers."""
    return jax.eval_shape(functools.partial(quantize, config=config), jax.ShapeDtypeStruct(shape, np.float32))


def _counted(source: Reader, plans: dict[str, Plan], layout: _Layout, progress: Progress) -> Iterator[tuple[str, Any]]:
    done, total = 0, sum(map(source.nbytes, source))
    for name, array, outputs in transformed(source, plans, layout.calibration):
        layout.outputs[name] = outputs
        yield name, array
        progress(done := done + source.nbytes(name), total)


def _write_file(
    source: Reader, target: Path, layout: _Layout, plans: dict[str, Plan], progress: Progress, note: Note
) -> list[Row] | None:
    """Write a file; returns the rows of the report if they are already known."""
    if layout.to == "lowbit":
        check_is_file(target)
        with locked(target) as journal:
            options: dict[str, Any] = {"journal": journal, "progress": progress, "note": note}
            options["calibration"] = layout.calibration
            with streamed(source, plans, target, metadata=_metadata(source), **options) as (staging, rows):
                put_in_place(staging, target)
        return rows
    arrays = layout.arrays(target, _counted(source, plans, layout, progress))
    if layout.to == "gguf":
        fields, tensors = _gguf_fields(source), dict(arrays)
        known = fields["general.file_type"].value if "general.file_type" in fields else None
        number = GGUFField("UINT32", file_type(tensors, layout.type, known))
        write_gguf(target, tensors, {**fields, "general.file_type": number}, type=layout.type)
    else:
        with atomic_write(target) as staging:
            layout.write(staging, arrays)
    return None


def _write_directory(
    source: HuggingFaceDir | LowbitDir,
    target: Path,
    layout: _Layout,
    plans: dict[str, Plan],
    progress: Progress,
    note: Note,
) -> list[Row] | None:
    if layout.to == "gguf":
        raise ValueError(f"{source.path} is a directory, which cannot become a GGUF file: it lacks the fields of one.")
    files: dict[str, Path | None] = {file.as_posix(): source.path / file for file in source.other_files}
    files[WEIGHTS] = None
    if layout.to in WRITERS:
        files["config.json"] = None
    with locked(target) as journal, _note_pending(target, note):
        finish(target)
        check_names(target, files)
        if layout.to == "lowbit":
            options: dict[str, Any] = {"journal": journal, "progress": progress, "note": note}
            options["calibration"] = layout.calibration
            discard(target, staging_path(target))
            with (
                streamed(source, plans, target, metadata={}, **options) as (staging, rows),
                staged(target, files, staging) as folder,
            ):
                _copy(files, folder)
                os.replace(staging, folder / WEIGHTS)
            return rows
        with staged(target, files) as folder:
            _copy(files, folder)
            arrays = layout.arrays(target, _counted(source, plans, layout, progress))
            weights = layout.write(folder / WEIGHTS, arrays)
            if layout.to in WRITERS:
                config = dict(source.metadata.get("config") or {})
                for key in ("quantization_config", "quantization"):  # of the source
                    config.pop(key, None)
                config |= WRITERS[layout.to].config(weights)
                (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return None


@contextmanager
def _note_pending(target: Path, note: Note) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if is_pending(target):
            note(f"{target} is half replaced. Repeat the same conversion to complete it.")
        raise


def _copy(files: Mapping[str, Path | None], folder: Path) -> None:
    for name, file in files.items():
        if file is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)


def as_written(written: Reader, planned: Plan, found: Row) -> Row:
    """The row of a tensor, with its type and size in the file that was written."""
    was, now = found.dtype, written.type(found.path)
    origin = found.format or was
    kept = origin == now and found.format is None and not found.error
    if kept:
        why = planned.why
    elif origin == now:
        why = found.why if found.format else f"was {was}"
    elif origin not in DTYPES and (now in DTYPES or (found.error and now not in FORMATS)):
        why = f"the error of {origin}, the size of {now}"
    else:
        why = f"was {origin}" if origin in DTYPES or not found.error else f"was {origin}, quantized again"
    axis = found.axis if now in FORMATS else None
    format, error = (None, None) if kept else (now, found.error)
    return dataclasses.replace(found, format=format, axis=axis, after=written.nbytes(found.path), error=error, why=why)


def _measured(
    source: Reader, written: Reader, plans: Mapping[str, Plan], outputs: Mapping[str, Outputs]
) -> Iterator[Row]:
    """Rows with errors that are measured by reading the written file back."""
    for found in compared(source, written, source):
        name, config = found["name"], plans[found["name"]].config
        format, axis = (None, None) if config is None else (str(config.dtype), config.axis)
        size = source.nbytes(name)
        own, why = outputs[name], plans[name].why
        why = why if own.how is None else f"{why}; {own.how}"
        row = Row(name, found["shape"], source.type(name), format, axis, size, size, found["error"], why)
        yield dataclasses.replace(row, output_before=own.before, output_after=own.after)


def _notes(rows: Iterable[Row], plans: Mapping[str, Plan], asked: bool, requantize: bool) -> Iterator[str]:
    """Sentences on what the totals of the report do not show."""
    mixed = Counter(row.why for row in rows if row.why.startswith("the error of "))
    for why, count in mixed.items():
        yield f"{count} tensor{'s have' if count > 1 else ' has'} {why.replace(', the', ' and the')}."
    stored = Counter(plan.why for plan in plans.values() if plan.why.startswith("stored as "))
    if any(plan.config is not None for plan in plans.values()) or not (asked or requantize):
        return
    if stored and asked:
        kept = ", ".join(f"{count} {why}" for why, count in stored.items())
        advice = "" if requantize else " Use requantize to quantize them again."
        yield f"Nothing was quantized, since tensors are already stored in a format: {kept}.{advice}"
    elif asked:
        yield "Nothing was quantized: no pattern selects a tensor that can be quantized."
    else:
        yield "Nothing was quantized: no format was given."


def _metadata(source: Reader) -> dict[str, Any]:
    """The metadata for a lowbit file that is made from a source."""
    if not isinstance(source, GGUFFile):
        return dict(source.metadata)
    return {"gguf": {key: _listed(field) for key, field in source.fields.items()}}


def header_bytes(source: Reader, target: Path, plans: Mapping[str, Plan]) -> int:
    """The bytes of a lowbit file besides those of its arrays."""
    likes = {name: Work.planned(source, name, plans[name]).like for name in source}
    layout = Layout(target, likes, {} if source.path.is_dir() else _metadata(source))
    return layout.size - sum(map(array_bytes, likes.values()))


def _gguf_fields(source: Reader) -> dict[str, GGUFField]:
    """The fields of a GGUF file, from itself or from a lowbit file that came from one."""
    if isinstance(source, GGUFFile):
        return source.fields
    listed = source.metadata.get("gguf")
    if not isinstance(listed, dict):
        raise ValueError(f"{source.path} was not made from a GGUF file, and lacks the fields that one needs.")
    return {key: _field(field) for key, field in listed.items()}


def plain_fields(listed: Any) -> dict[str, Any] | None:
    """The values of GGUF fields in the metadata of a lowbit file, without their types."""
    if not isinstance(listed, dict):
        return None
    return {key: without_types(_field(field)) for key, field in listed.items()}


def _listed(field: GGUFField) -> list[Any]:
    """A field as JSON: its type and its value."""
    return [field.type, [_listed(f) for f in field.value] if field.type == "[ARRAY]" else field.value]


def _field(listed: Any) -> GGUFField:
    if not isinstance(listed, list) or len(listed) != 2 or not isinstance(listed[0], str):
        raise ValueError(f"{listed!r:.80} is not a GGUF field: it must be a type and a value.")
    kind, value = listed
    return GGUFField(kind, [_field(f) for f in value] if kind == "[ARRAY]" else value)


def checked_type(type: str) -> Literal["F16", "Q8_0"]:
    """Raise unless `type` is one that matrices can be written in."""
    if type == "F16" or type == "Q8_0":
        return type
    raise ValueError(f"Unknown type {type!r} for a GGUF file: it must be F16 or Q8_0.")
