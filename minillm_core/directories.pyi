"""The names of ``minillm_core.directories``, and the modules that define them."""

from minillm_core.checkpoint.directories import (
    DirectoryFormat as DirectoryFormat,
    Fitted as Fitted,
    ModelDirectory as ModelDirectory,
    TrainedModel as TrainedModel,
    refuse_taken as refuse_taken,
)
from minillm_core.checkpoint.tensors import WIDTHS as WIDTHS, Stored as Stored, header, parts
from minillm_core.config.schema import ModelConfig as ModelConfig
from minillm_core.data.tokenizer import LARGEST_TOKENIZER as LARGEST_TOKENIZER
from minillm_core.disk import aside, rename, stream, sync, write
from minillm_core.strict import LARGEST, parse

LARGEST_JSON = LARGEST
name_aside = aside
parse_json = parse
rename_path = rename
stream_file = stream
sync_path = sync
tensor_file = parts
tensor_places = header
write_file = write
