"""Writing lowbit files in chunks, so that checkpoints may be larger than memory."""

from ._journal import locked as locked
from ._staging import Note as Note
from ._staging import staging_path as staging_path
from ._stream import Progress as Progress
from ._stream import streamed as streamed
from ._work import Work as Work
