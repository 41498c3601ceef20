"""Tokenizers: from the fields of a GGUF file, or from a Hugging Face directory.

Byte-level BPE: a regular expression splits text into words, each byte of a word is written as one visible character,
and adjacent pairs are merged in the order of the file's list. The field `tokenizer.ggml.pre` names the regular
expression; the table below has a row for each supported name (llama.cpp, `llama-vocab.cpp`).
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self


class TemplateError(ValueError):
    """A model whose chat template cannot be applied."""


class _Pre(NamedTuple):
    """The meaning of a value of `tokenizer.ggml.pre`.

    - `splits`: regular expressions, each applied to the words that the one before gave. A match is a word, and so is
      the text between two matches.
    - `whole_words`: a word that is a token is that token, even if no merges lead to it.
    - `add_bos`: the default, if the file does not say.
    """

    splits: tuple[str, ...]
    whole_words: bool
    add_bos: bool


_PRE = {
    # Each digit separately, then the expression of GPT-2.
    "smollm": _Pre(
        (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        whole_words=False,
        add_bos=False,
    ),
    # The expression of Llama 3: digits in threes, line breaks with the punctuation or space before them.
    "llama-bpe": _Pre(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        whole_words=True,
        add_bos=True,
    ),
}
# Types of tokens in `tokenizer.ggml.token_type`. Both are matched literally, before the text is split into words, but
# only user-defined ones are text themselves.
_CONTROL, _USER_DEFINED = 3, 4

# The turns of ChatML. The system prompt of the template is used by conversations without one.
_TURN, _TURN_END = "<|im_start|>", "<|im_end|>"
_DEFAULT_SYSTEM = re.compile(re.escape(_TURN) + r"system\n([^'\"{}]*)" + re.escape(_TURN_END))


class Tokenizer:
    """Token ids of text, and text of token ids. `Tokenizer.from_gguf(file.metadata)` makes one.

        tokenizer = Tokenizer.from_gguf(GGUFFile("model.gguf").metadata)
        tokenizer.decode(tokenizer.encode("Hello"))     # 'Hello'
        for text in tokenizer.stream(ids): ...          # as the ids are generated

    - `bos`, `eos`: the ids that begin and end a text, or None.
    - `add_bos`: whether `encode` begins with `bos`.
    """

    bos: int | None
    eos: int | None
    add_bos: bool

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        pre: str,
        *,
        token_type: Sequence[int] = (),
        bos: int | None = None,
        eos: int | None = None,
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ):
        how = _PRE[pre]
        ids = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        _check_merges(ids, pairs)
        byte_of = _byte_alphabet()
        types = token_type or [1] * len(tokens)
        self.bos, self.eos = bos, eos
        self.add_bos = how.add_bos if add_bos is None else add_bos
        self._chat_template = chat_template
        self._control = {t: ids[t] for t, type in zip(tokens, types, strict=True) if type == _CONTROL and t}
        self._bytes = [
            b"" if type == _CONTROL else token.encode() if type == _USER_DEFINED else _spelled(token, byte_of)
            for token, type in zip(tokens, types, strict=True)
        ]
        self._missing = frozenset(byte for char, byte in byte_of.items() if char not in ids)
        # The longest first, as one may be a prefix of another; without any, a pattern that never matches.
        names = sorted(self._control, key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "((?!))")
        user_defined = [t for t, type in zip(tokens, types, strict=True) if type == _USER_DEFINED and t]
        self._bpe = _bpe(ids, pairs, how, user_defined)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """The tokenizer in the metadata of a GGUF file, or a `ValueError` that names the field that does not fit."""
        read = _Fields(metadata)
        read.one_of("tokenizer.ggml.model", ["gpt2"])
        pre = read.one_of("tokenizer.ggml.pre", list(_PRE))
        tokens = read.list_of("tokenizer.ggml.tokens", str)
        if len(set(tokens)) < len(tokens):
            raise ValueError("The GGUF field tokenizer.ggml.tokens has duplicate tokens.")
        types = read.list_of("tokenizer.ggml.token_type", int) if "tokenizer.ggml.token_type" in metadata else []
        if types and len(types) != len(tokens):
            raise ValueError(
                f"The GGUF field tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens."
            )
        return cls(
            tokens,
            read.list_of("tokenizer.ggml.merges", str),
            pre,
            token_type=types,
            bos=read.token("tokenizer.ggml.bos_token_id", len(tokens)),
            eos=read.token("tokenizer.ggml.eos_token_id", len(tokens)),
            add_bos=read.optional("tokenizer.ggml.add_bos_token", bool),
            chat_template=read.optional("tokenizer.chat_template", str),
        )

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self._bytes)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text.

        With `special`, control tokens in the text (`<|im_end|>`) are read as such, and `bos` is put first if the model
        wants it. Without, everything is plain text, so that a user's words cannot end a turn.
        """
        missing = self._missing.intersection(text.encode())
        if missing:
            where, char = next((i, c) for i, c in enumerate(text) if missing.intersection(c.encode()))
            raise ValueError(
                f"Cannot encode the character {char!r} at {where}: this vocabulary has no token for a byte of it. "
                "Remove the character."
            )
        if not special:
            return self._bpe.encode(text, add_special_tokens=False).ids
        ids = [self.bos] if self.add_bos and self.bos is not None else []
        for part in self._controls.split(text):
            ids += [self._control[part]] if part in self._control else self.encode(part, special=False)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Control tokens have none; invalid UTF-8 gives U+FFFD."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of token ids, incrementally: `"".join(stream(ids)) == decode(ids)`.

        A character whose bytes are in several tokens is yielded with the last of them.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            if not 0 <= i < len(self):
                raise ValueError(f"There is no token {i}: this vocabulary has {len(self)}.")
            if text := decoder.decode(self._bytes[i]):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def chat(self, prompt: str, *, system: str | None = None) -> list[int]:
        """The ids of a conversation that begins with `prompt`, up to where the model is to answer.

        The model must have been trained with ChatML. `system` defaults to the system prompt of the file's template.
        """
        template = self._chat_template or ""
        absent = [token for token in (_TURN, _TURN_END) if token not in self._control or token not in template]
        if absent:
            if not template:
                raise TemplateError("The file has no chat template (the GGUF field tokenizer.chat_template).")
            raise TemplateError(
                f"The GGUF field tokenizer.chat_template is not ChatML, the only supported template: "
                f"{' and '.join(absent)} must be in it and a control token."
            )
        if system is None and (found := _DEFAULT_SYSTEM.search(template.replace("\\n", "\n"))):
            system = found[1]
        turns = ([] if system is None else [f"system\n{system}"]) + [f"user\n{prompt}"]
        ids = self.encode("")
        for turn in turns:
            ids += [self._control[_TURN], *self.encode(turn, special=False), self._control[_TURN_END]]
            ids += self.encode("\n", special=False)
        return [*ids, self._control[_TURN], *self.encode("assistant\n", special=False)]


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face directory: `tokenizer.json`, and the end token from the files next to it.

    It has the interface of `Tokenizer`.
    """

    def __init__(self, folder: Path):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("Text models need the tokenizers package: pip install 'lowbit[demo]'") from error
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json.")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more specific
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
        config = self._json(folder / "tokenizer_config.json")
        eos = config.get("eos_token")
        name = eos.get("content") if isinstance(eos, dict) else eos
        self.eos: int | None = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        self._chat_template = config.get("chat_template")

    @staticmethod
    def _json(path: Path) -> dict[str, Any]:
        try:
            found = json.loads(path.read_bytes()) if path.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        return found if isinstance(found, dict) else {}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, with the tokens that the file wants around it if `special`."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without control tokens."""
        return self._tokenizer.decode(list(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text of token ids, incrementally."""
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        for i in ids:
            if text := decoder.step(self._tokenizer, i):
                yield text

    def chat(self, prompt: str) -> list[int]:
        """The ids of a conversation that begins with `prompt`, up to where the model is to answer."""
        template = self._chat_template if isinstance(self._chat_template, str) else ""
        if _TURN not in template or self._tokenizer.token_to_id(_TURN) is None:
            raise TemplateError("tokenizer_config.json has no ChatML template, the only one that is supported.")
        system = _DEFAULT_SYSTEM.search(template.replace("\\n", "\n"))
        turns = ([f"system\n{system[1]}"] if system else []) + [f"user\n{prompt}"]
        text = "".join(f"{_TURN}{turn}{_TURN_END}\n" for turn in turns) + f"{_TURN}assistant\n"
        return self.encode(text, special=False)


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte: itself if it is visible in Latin-1, else the next one from U+0100 on."""
    visible = [byte for byte in range(256) if 0x21 <= byte <= 0x7E or (0xA1 <= byte and byte != 0xAD)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _spelled(token: str, byte_of: Mapping[str, int]) -> bytes:
    """The bytes that the characters of a token stand for; a token in other characters stands for itself."""
    if all(char in byte_of for char in token):
        return bytes(byte_of[char] for char in token)
    return token.encode()


def _check_merges(ids: Mapping[str, int], pairs: Sequence[tuple[str, ...]]) -> None:
    for i, pair in enumerate(pairs):
        unknown = [part for part in (*pair, "".join(pair)) if part not in ids]
        if len(pair) != 2 or unknown:
            raise ValueError(
                f"Entry {i} of the GGUF field tokenizer.ggml.merges is {' '.join(pair)!r}: it must be two tokens "
                "separated by a space, which together make a token"
                + (f"; {unknown[0]!r} is not a token." if unknown else ".")
            )


def _bpe(ids: dict[str, int], pairs: Sequence[tuple[str, ...]], how: _Pre, user_defined: Sequence[str]) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("Text models need the tokenizers package: pip install 'lowbit[demo]'") from error
    from tokenizers import models, pre_tokenizers

    merges: Any = pairs
    bpe = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=how.whole_words))
    splits = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in how.splits]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    bpe.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in user_defined])
    return bpe


class _Fields:
    """Reads metadata fields of the types that they must have."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata

    def required(self, name: str) -> Any:
        if name not in self.metadata:
            raise ValueError(f"The GGUF field {name} is missing: this file has no tokenizer that can be read.")
        return self.metadata[name]

    def one_of(self, name: str, known: list[str]) -> str:
        value = self.required(name)
        if value not in known:
            raise ValueError(f"The GGUF field {name} is {value!r}. Known: {', '.join(known)}.")
        return value

    def list_of(self, name: str, kind: type) -> list[Any]:
        value = self.required(name)
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            raise ValueError(f"The GGUF field {name} must be an array of {kind.__name__}.")
        return value

    def optional(self, name: str, kind: type) -> Any:
        value = self.metadata.get(name)
        if value is not None and type(value) is not kind:
            raise ValueError(f"The GGUF field {name} is {value!r}, and must be a {kind.__name__}.")
        return value

    def token(self, name: str, count: int) -> int | None:
        value = self.optional(name, int)
        if value is not None and not 0 <= value < count:
            raise ValueError(f"The GGUF field {name} is {value}, and there are {count} tokens.")
        return value
