"""The names of ``minillm_core.inspection``, and the modules that define them."""

from minillm_core.backends.base import Snapshot as Snapshot, Trainer as Trainer
from minillm_core.backends.bind import create_trainer, verdicts as verdicts
from minillm_core.backends.candidates import MLX, TORCH
from minillm_core.backends.detect import (
    DEVICES as DEVICES,
    Detected as Detected,
    InstalledFramework as InstalledFramework,
    Machine as Machine,
    choose as choose,
    default_preset as default_preset,
    probe as probe,
)
from minillm_core.backends.memory import memory as memory, memory_limit as memory_limit
from minillm_core.backends.native import materialise as materialise
from minillm_core.backends.ranks import (
    ALONE as ALONE,
    Ranks as Ranks,
    join as join,
    launched as launched,
)
from minillm_core.backends.steps import warmed as warmed
from minillm_core.backends.native import rows_of as rows_of
from minillm_core.backends.torch.compiling import own_code as own_code
from minillm_core.checkpoint.commit import non_finite as non_finite
from minillm_core.checkpoint.layout import of_rank
from minillm_core.checkpoint.tensors import ROW as ROW, parts
from minillm_core.config.check import check_option as check_option
from minillm_core.config.origins import from_assignments as from_assignments
from minillm_core.config.schema import Config as Config
from minillm_core.config.selection import name_of
from minillm_core.config.values import read_value as read_value
from minillm_core.data import (
    Documents as Documents,
    Loader as Loader,
    OnBatch as OnBatch,
    StepBatch as StepBatch,
)
from minillm_core.data.batch import part_of as part_of
from minillm_core.deferred import Deferred as Deferred
from minillm_core.disk import Written as Written, stream
from minillm_core.errors import PluginCodeError as PluginCodeError
from minillm_core.install import FRAMEWORKS as FRAMEWORKS, unmet as unmet
from minillm_core.nn.decoder import (
    Loss as Loss,
    ahead as ahead,
    decoder as decoder,
    lookup as lookup,
)
from minillm_core.nn.init import generator as generator
from minillm_core.nn.initial import initial_values as initial_values
from minillm_core.nn.module import (
    Framework as Framework,
    declared as declared,
    materialising as materialising,
    named_modules as named_modules,
    record as record,
)
from minillm_core.nn.block import (
    COLUMNS as COLUMNS,
    GATHERED as GATHERED,
    LABELS as LABELS,
    Omitted as Omitted,
)
from minillm_core.nn.node import (
    Node as Node,
    Scope as Scope,
    Setting as Setting,
    call_names as call_names,
    inputs_of as inputs_of,
)
from minillm_core.nn.rope import Staged as Staged
from minillm_core.ops.arrays import Known, visible
from minillm_core.ops.contract import CONTRACTS as CONTRACTS
from minillm_core.ops.select import Choice as Choice
from minillm_core.optim.groups import Group as Group, Member as Member, groups_of as groups_of
from minillm_core.optim.update import (
    apart as apart,
    cycles_of as cycles_of,
    due_at as due_at,
    initial_state as initial_state,
    joined as joined,
    update as update,
)
from minillm_core.optim.views import views_of as views_of
from minillm_core.plugins.attribution import attribute_errors as attribute_errors
from minillm_core.plugins.attribution import own_frames as own_frames
from minillm_core.plugins.discover import (
    GROUP as GROUP,
    bad_name as bad_name,
    entry_points as entry_points,
    installed_plugins as installed_plugins,
    local_package as local_package,
    unreadable as unreadable,
)
from minillm_core.plugins.first_party import (
    CORE as CORE,
    DISTRIBUTIONS as DISTRIBUTIONS,
    version_mix as version_mix,
)
from minillm_core.plugins.manager import (
    FoundPlugin as FoundPlugin,
    LoadedPlugin as LoadedPlugin,
    check_support as check_support,
    find_plugin as find_plugin,
    with_options as with_options,
)
from minillm_core.plugins.manifest import read_class as read_class
from minillm_core.train.evidence import Evidence as Evidence
from minillm_core.train.hooks import plan_hook, observers as observers

MLX_KERNELS = MLX
rank_file = of_rank
stream_file = stream
tensor_file = parts
OpsBase = Known
TORCH_KERNELS = TORCH
batch_hook = plan_hook
plugin_name = name_of
trainer = create_trainer
visible_keys = visible
