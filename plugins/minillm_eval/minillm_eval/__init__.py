"""Evaluation of runs and model directories on tasks of lm-evaluation-harness.

harness     the harness's model interface of a run: log-likelihoods and generated texts
judge       evaluation on tasks by name, and their metrics
"""

from __future__ import annotations

from minillm_eval.harness import HarnessModel
from minillm_eval.judge import judge_tasks

__all__ = ["HarnessModel", "judge_tasks"]
