"""The names of ``minillm_core.documents``, and the modules that define them."""

from minillm_core.config.schema import weighted_path as weighted_path
from minillm_core.data.cutting import Continued as Continued
from minillm_core.data.documents import digest as digest
from minillm_core.data.formats import (
    EMPTY as EMPTY,
    FORMATS as FORMATS,
    MAX_LINE_BYTES as MAX_LINE_BYTES,
    Document as Document,
    Format as Format,
    MalformedError as MalformedError,
    Place as Place,
    Progress as Progress,
    Reading as Reading,
    Record as Record,
    documents_of as documents_of,
    opened as opened,
    read_records as read_records,
    ticker as ticker,
)
from minillm_core.data.shards import map_shard as map_shard, write_shard as write_shard
from minillm_core.data.sources import (
    Source as Source,
    find as find,
    fitting_entries as fitting_entries,
    stated_end_of_text as stated_end_of_text,
)
from minillm_core.data.store import abandoned, alone, entry_folders as entry_folders, read_meta
from minillm_core.data.stream import next_source as next_source
from minillm_core.plugins.sourcing import Segment as Segment, Special as Special
from minillm_core.data.tokenise import Sample as Sample, encode_documents as encode_documents
from minillm_core.data.tokenizer import (
    END_OF_TEXT as END_OF_TEXT,
    Tokenizer as Tokenizer,
    bytes_per_token as bytes_per_token,
    grouped as grouped,
)
from minillm_core.disk import remove, replace

abandoned_entry = abandoned
lock_cache = alone
read_entry_facts = read_meta
remove_path = remove
replace_file = replace
