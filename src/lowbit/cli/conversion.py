"""What `quantize` and `convert` have in common: calibration, the choice of formats, progress and the report."""

import dataclasses
import shlex
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import typer

from lowbit.io import DequantizedWarning, open_tensors
from lowbit.io._atomic import atomic_write
from lowbit.models.patterns import Rule
from lowbit.models.report import Report

from .printing import print_json, print_table, printable
from .progress import counted


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """The text to calibrate with: how many of its tokens, whether gradients weight them, and memory for statistics."""

    path: Path
    tokens: int
    gradients: bool
    budget: str


@dataclasses.dataclass(frozen=True)
class Goal:
    """Bits per weight or the size of the result, the formats to choose from, and how many tokens to measure with."""

    bits: float | None
    size: str | None
    formats: Sequence[tuple[str, Any]]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A run of `quantize` or `convert`."""

    source: Path
    target: Path
    to: str | None
    type: str
    force: bool
    as_json: bool
    flags: dict[str, bool]
    page: Path | None = None

    def run(self, rules: Sequence[Rule], text: CalibrationText | None = None, goal: Goal | None = None) -> None:
        """Convert, and print the report. With a goal, the tensors that no rule matches get the formats it chooses."""
        from lowbit.io._convert import check_target, convert

        file = open_tensors(self.source, strict=self.flags["strict"])
        check_target(self.source, self.target, force=self.force)
        if self.page is not None:
            check_page(self.page, (self.source, self.target), self.force)
        chosen: list[tuple[str, str]] = []
        with warnings.catch_warnings(), counted(self.target.name) as (progress, line, doing):
            warnings.simplefilter("ignore", DequantizedWarning)  # printed below, a line for each

            def note(text: str) -> None:
                line(f"lowbit: {text}")

            moments = None if text is None else text_moments(file, text, note, doing)
            if goal is not None:
                guided = moments if text is not None and text.gradients else None
                chosen, rules = self.allocated(file, rules, text, goal, guided, note, doing)
            report = convert(
                file,
                self.target,
                rules=list(rules),
                to=self.to,
                type=self.type,
                calibration=moments,
                progress=progress,
                note=note,
                **self.flags,
            )
        if self.page is not None:
            write_page(self.page, report, self.source, self.target)
        self.show(file, report, [f"{pattern}={format}" for pattern, format in chosen])

    def allocated(
        self,
        file: Any,
        rules: Sequence[Rule],
        text: CalibrationText | None,
        goal: Goal,
        guided: Any,
        note: Callable[[str], None],
        doing: Callable[[str], None],
    ) -> tuple[list[tuple[str, str]], list[Rule]]:
        """The formats that a goal leads to, and all rules."""
        from lowbit.demo import calibration, evaluation
        from lowbit.io._convert import default_format

        if text is None:
            note(
                "No text was given: how much each weight matters is measured on 20 kB of prose in the package. "
                "--calibrate TEXT measures on your text, and also rounds for it."
            )
        prose = evaluation.demo_text() if text is None else read_text(text.path)
        found = calibration.allocated(
            _llama(file, "--bits and --size run the model"),
            calibration.Text.of(file, prose, goal.tokens),
            goal.formats,
            rules,
            bits=goal.bits,
            size=goal.size,
            target=self.target,
            requantize=self.flags["requantize"],
            guided=guided,
            doing=doing,
        )
        return found.patterns, [*found.rules, Rule("*", default_format(self.to))]

    def show(self, file: Any, report: Any, chosen: Sequence[str]) -> None:
        """Print the report, and the rules that were chosen as they can be given again."""
        for name, reason in getattr(file, "dequantized", {}).items():
            typer.echo(f"lowbit: {printable(name)} was dequantized: {reason}.", err=True)
        for pattern in report.unmatched:
            typer.echo(f"lowbit: The pattern {pattern!r} matched no tensor.", err=True)
        if self.as_json:
            totals = {"before": report.before, "after": report.after, "on_disk": report.on_disk}
            named = {"unmatched": report.unmatched, "notes": report.notes, "rules": chosen}
            return print_json({"tensors": report.as_dicts(), **totals, **named})
        head, *rows = report.table
        print_table(head, rows)
        for note in report.notes:
            typer.echo(note)
        if chosen:
            typer.echo("The same formats by rules, which you can edit:")
            for rule in chosen:
                typer.echo(f"  --rule {shlex.quote(rule)}")


def _llama(file: Any, why: str) -> Any:
    """The model in a file, or an error that says what it is needed for."""
    from lowbit.demo.language_model import model_fields
    from lowbit.demo.llama import LlamaFile

    try:
        return LlamaFile.of(file, model_fields(file))
    except ValueError as error:
        raise ValueError(f"{why}, and that is not possible: {error}") from None


def text_moments(file: Any, text: CalibrationText, note: Callable[[str], None], doing: Callable[[str], None]) -> Any:
    """The moments of the inputs of the weights of a llama, which are computed as they are needed."""
    from lowbit.demo import calibration

    source = _llama(file, "--calibrate runs the model")
    tokens = calibration.Text.of(file, read_text(text.path), text.tokens)
    if tokens.used < text.tokens:
        note(f"{text.path} has {tokens.tokens:,} tokens; {tokens.used:,} are used, and {text.tokens:,} were asked for.")
    return calibration.TextMoments(source, tokens, gradients=text.gradients, budget=text.budget, doing=doing)


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}.") from None


def check_page(output: Path, sources: Iterable[Path], force: bool) -> None:
    """Raise before any work is done if the page cannot be written, or exists and `force` is not set."""
    if output.is_dir():
        raise ValueError(f"{output} is a directory. Give the name of a file.")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"{output} cannot be written: there is no directory {output.parent}.")
    if output.exists() and any(source.exists() and output.samefile(source) for source in sources):
        raise ValueError(f"{output} is one of the two files. Give another name.")
    if output.exists() and not force:
        raise ValueError(f"{output} exists. --force replaces it.")


def write_page(output: Path, report: Report, a: Path, b: Path) -> None:
    """Write a report on two files as an HTML page."""
    with atomic_write(output) as staged:
        staged.write_text(report.to_html(f"{a.name} \u2192 {b.name}"), "utf-8")
