"""Files: saving and loading trees, readers for other libraries' files, converting and comparing.

    lowbit.io.open_tensors(path)            # the tensors of any file or directory, by name
    lowbit.io.convert(source, target)       # quantize a checkpoint, or change the kind of file
    lowbit.io.compare(a, b)                 # a report on two files

`docs/files.md` is the guide, `docs/file-format.md` the specification of lowbit files.
"""

from ._checks import OptionNeeded as OptionNeeded
from ._compare import compare as compare
from ._convert import convert as convert
from ._files import load as load
from ._files import load_metadata as load_metadata
from ._files import save as save
from .bitsandbytes import DequantizedWarning as DequantizedWarning
from .bitsandbytes import bitsandbytes_tensors as bitsandbytes_tensors
from .bitsandbytes import quantization_config as quantization_config
from .gguf_writer import write_gguf as write_gguf
from .readers import GGUFFile as GGUFFile
from .readers import HuggingFaceDir as HuggingFaceDir
from .readers import LowbitDir as LowbitDir
from .readers import LowbitFile as LowbitFile
from .readers import Reader as Reader
from .readers import SafetensorsFile as SafetensorsFile
from .readers import open_tensors as open_tensors
from .readers.gguf import GGUFField as GGUFField
