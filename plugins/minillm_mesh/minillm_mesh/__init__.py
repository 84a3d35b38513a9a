"""Training in several processes: who communicates, by what, and how they are started.

layout          which rank updates what, of a plan: pure
torch_share     updates divided so: gradients to their owners, new weights to all
torch_ranks     collectives by torch.distributed (NCCL on GPUs, gloo on CPUs)
collectives     torch's under names that every version has, and their errors
axes            each way of dividing a run, and why a plan is refused there: pure
by_columns      plans whose rows cannot be shared, refused: pure
context         columns of rows that several ranks share: cut and attended
heads           the spec of a model of 1 / N of the heads and hidden units: pure
tensor          that model on torch, whose parameters are slices of the whole one's
proof           one row through both models, which finds nodes that mix heads
exchange        keys gathered or heads exchanged for columns: the cheaper of a plan; pure
stages          which layers each rank of a pipeline computes, and what crosses: pure
pipeline        a stage run by torch.distributed.pipelining
launcher        the processes of ``minillm train --gpus``: started together, ended together
mlx_ranks       collectives by mx.distributed
cost            the cost model: bytes, FLOPs and bandwidths -> seconds
forecast        minillm plan --gpus N: a plan's estimate, divided, and what the cost model makes of it
alive           a watch on the other processes: one that is stopped or hangs is named, and ends the run
"""

from __future__ import annotations

__all__: list[str] = []
