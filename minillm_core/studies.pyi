"""The names of ``minillm_core.studies``, and the modules that define them."""

from minillm_core.backends.base import (
    Backend as Backend,
    Batch as Batch,
    Binding as Binding,
    Trainer as Trainer,
)
from minillm_core.backends.bind import create_backend as create_backend
from minillm_core.backends.detect import Detected as Detected
from minillm_core.backends.ranks import divides as divides
from minillm_core.checkpoint.lock import lock as lock
from minillm_core.config.load import Loaded as Loaded
from minillm_core.config.presets import plugins_of as plugins_of, recipe_names as recipe_names
from minillm_core.config.values import show
from minillm_core.config.selection import added as added, taken_away as taken_away
from minillm_core.data import Corpus as Corpus
from minillm_core.disk import replace
from minillm_core.plan.plan import variants_of as variants_of
from minillm_core.plan.render import amount as amount, sized as sized
from minillm_core.plugins.attribution import attribute_errors as attribute_errors
from minillm_core.plugins.manager import LoadedPlugin as LoadedPlugin
from minillm_core.plugins.sourcing import Sourcing as Sourcing
from minillm_core.train.budget import Budget as Budget
from minillm_core.train.document import settings_file as settings_file
from minillm_core.train.job import read_corpus as read_corpus
from minillm_core.train.memory import bytes_of as bytes_of
from minillm_core.train.metrics import (
    METRICS as METRICS,
    read_events as read_events,
    thin as thin,
)
from minillm_core.train.record import (
    ABLATION as ABLATION,
    RUN as RUN,
    RUNS as RUNS,
    hardware as hardware,
    read_json as read_json,
    read_record as read_record,
    refuse_unwritable as refuse_unwritable,
    versions as versions,
)
from minillm_core.train.request import (
    Prepared as Prepared,
    RunRequest as RunRequest,
    prepare as prepare,
)
from minillm_core.train.session import Shared as Shared
from minillm_core.train.signals import (
    StopRequest as StopRequest,
    stop_on_signals as stop_on_signals,
)

replace_file = replace
show_value = show
