"""Distributed training: sharding of updates and weights, context, tensor and pipeline parallelism, launcher.

layout          which rank updates which parameters of a plan: pure
torch_share     sharded updates: reduce-scatter of gradients, all-gather of weights
torch_ranks     collectives by torch.distributed (NCCL on GPUs, gloo on CPUs)
collectives     torch's, under names common to all versions, and their errors
axes            each way of dividing a run, and why a plan is refused there: pure
context_checks  check that a plan supports context parallelism: pure
context         context parallelism: rows cut by columns, and their attention
tensor_spec     tensor parallelism: the spec of a model of 1 / N of the heads and hidden units: pure
tensor          that model on torch, with slices of the whole model's parameters
tensor_validation  one row through both models, to find nodes that mix heads
exchange        all-gather of keys or all-to-all of heads in context parallelism: the cheaper; pure
stages          which layers each pipeline stage computes, and the arrays sent between stages: pure
pipeline        pipeline parallelism: a stage run by torch.distributed.pipelining
launcher        the processes of ``minillm train --gpus``: started together, ended together
mlx_ranks       collectives by mx.distributed
cost            the cost model: bytes, FLOPs and bandwidths -> seconds
forecast        memory, traffic and step time on N cards
automatic       sizes of the mesh that settings leave open, and minillm plan --gpus N
heartbeat       heartbeats: a stopped or lost process is named, and the run ends
"""

from __future__ import annotations

__all__: list[str] = []
