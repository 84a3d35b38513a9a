"""The names of ``minillm_core.commands``, and the modules that define them."""

from minillm_core.cli.console import emit as emit, say as say, write as write
from minillm_core.cli.options import (
    AsJson as AsJson,
    InferenceOptions as InferenceOptions,
    Plugins as Plugins,
    RunPlugins as RunPlugins,
    SamplingOptions as SamplingOptions,
    Steps as Steps,
    StudyOptions as StudyOptions,
    folder as folder,
)
from minillm_core.config.folders import cache_folder as cache_folder, data_folder as data_folder
from minillm_core.install import pip_line as pip_line
from minillm_core.plan.render import amount as amount, columns as columns, sized as sized
from minillm_core.text import (
    counted as counted,
    few as few,
    listed as listed,
    nearest as nearest,
    plain as plain,
    printable as printable,
    rounded as rounded,
)
from minillm_core.train.progress import display as display, duration as duration
