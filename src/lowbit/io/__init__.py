"""Files: saving and loading trees, readers for other libraries' files, converting and comparing.

    lowbit.io.open_tensors(path)            # the tensors of any file or directory, by name
    lowbit.io.convert(source, target)       # quantize a checkpoint, or change the kind of file
    lowbit.io.compare(a, b)                 # a report on two files

`docs/files.md` is the guide, `docs/file-format.md` the specification of lowbit files.
"""

from ._checks import OptionNeeded
from ._compare import compare
from ._convert import convert
from ._files import load, load_metadata, save
from .bitsandbytes import DequantizedWarning, bitsandbytes_tensors, quantization_config
from .gguf_writer import write_gguf
from .readers import GGUFFile, HuggingFaceDir, LowbitDir, LowbitFile, Reader, SafetensorsFile, open_tensors
from .readers.gguf import GGUFField

__all__ = [
    "DequantizedWarning",
    "GGUFField",
    "GGUFFile",
    "HuggingFaceDir",
    "LowbitDir",
    "LowbitFile",
    "OptionNeeded",
    "Reader",
    "SafetensorsFile",
    "bitsandbytes_tensors",
    "compare",
    "convert",
    "load",
    "load_metadata",
    "open_tensors",
    "quantization_config",
    "save",
    "write_gguf",
]
