"""Tasks of lm-evaluation-harness, answered by runs and model directories.

harness     a run as the harness asks a model: log-likelihoods of continuations, and texts
judge       tasks by name, and their figures
"""

from __future__ import annotations

from minillm_eval.harness import HarnessModel
from minillm_eval.judge import judge_tasks

__all__ = ["HarnessModel", "judge_tasks"]
