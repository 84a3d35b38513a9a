"""The public names and the modules that define them.

Type checkers read this file; ``__init__.py`` looks names up in it, so that there is one list.
"""

from minillm_core.errors import (
    BackendError as BackendError,
    ConfigError as ConfigError,
    DataError as DataError,
    Interrupted as Interrupted,
    MinillmError as MinillmError,
    NoCheckpoint as NoCheckpoint,
    NoEvidence as NoEvidence,
    NonFinite as NonFinite,
    OutOfMemory as OutOfMemory,
    PlanError as PlanError,
    PluginCodeError as PluginCodeError,
    PluginError as PluginError,
    Refusal as Refusal,
    Stopped as Stopped,
)
from minillm_core.install import gpu_capabilities as gpu_capabilities, gpu_refusal as gpu_refusal
from minillm_core.nn.attention import Call as Call, Layout as Layout
from minillm_core.nn.decoding import EVERYTHING as EVERYTHING
from minillm_core.nn.init import (
    Constant as Constant,
    Init as Init,
    Normal as Normal,
    Uniform as Uniform,
    ones as ones,
    zeros as zeros,
)
from minillm_core.nn.layers import Linear as Linear
from minillm_core.nn.module import Module as Module
from minillm_core.nn.node import Geometry as Geometry, ModelShape as ModelShape
from minillm_core.nn.param import Buffer as Buffer, Param as Param, State as State
from minillm_core.nn.residual import Learned as Learned
from minillm_core.nn.rope import Rope as Rope, llama_frequencies as llama_frequencies
from minillm_core.ops.contract import Rotary as Rotary
from minillm_core.ops.form import LossForm as LossForm, SigmoidCap as SigmoidCap, TanhCap as TanhCap
from minillm_core.ops.select import Candidate as Candidate, Request as Request
from minillm_core.optim.schedules import (
    cosine as cosine,
    piecewise as piecewise,
    plateaus as plateaus,
    scheduled as scheduled,
    stages as stages,
)
from minillm_core.optim.rows import RowRule as RowRule
from minillm_core.optim.stage import INHERITED as INHERITED, Rule as Rule, stage as stage
from minillm_core.plan import Plan as Plan, build_plan as build_plan
from minillm_core.plugins.layers import Layers as Layers
from minillm_core.plugins.manifest import HOOK_API as HOOK_API
from minillm_core.plugins.options import option as option
from minillm_core.plugins.sourcing import Packer as Packer, Piece as Piece
from minillm_core.plugins.plugin import Plugin as Plugin
from minillm_core.plugins.streams import random_stream as random_stream
from minillm_core.train.events import (
    Ended as Ended,
    Evaluated as Evaluated,
    Event as Event,
    Guarded as Guarded,
    Resumed as Resumed,
    Rewound as Rewound,
    Sampled as Sampled,
    Saved as Saved,
    Skipped as Skipped,
    Started as Started,
    Stepped as Stepped,
    Throughput as Throughput,
    Unsaved as Unsaved,
)
from minillm_core.train.generate import Stream as Stream
from minillm_core.train.hooks import Verdict as Verdict
from minillm_core.train.predict import Predictor as Predictor
from minillm_core.train.restore import FrozenModel as FrozenModel
from minillm_core.train.run import Run as Run, load as load

__version__: str
