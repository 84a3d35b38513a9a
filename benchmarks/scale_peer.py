"""nanoGPT's model trained by plain torch in several processes: DDP, or FSDP2 compiled by block.

    torchrun --nproc-per-node 2 -m benchmarks.scale_peer ddp --nanogpt MODEL_PY --rows 64
    torchrun --nproc-per-node 2 -m benchmarks.scale_peer fsdp --nanogpt MODEL_PY --rows 8 --layers 24 ...

The model is read from a file supplied by the caller. DDP is as in its ``train.py``: float32 weights,
bfloat16 autocast, one graph, fused AdamW, gradients averaged without synchronisation but in the last micro-batch.
FSDP2 has bfloat16 weights and float32 reductions, and reduces in every micro-batch. Token ids are random.
Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.command import parser
from benchmarks.nanogpt import LEARNING_RATE, module_of

VOCAB = 50_304


def main() -> None:
    options = parser(__doc__)
    options.add_argument("how", choices=("ddp", "fsdp"))
    options.add_argument("--nanogpt", type=Path, required=True)
    for name, default in (("rows", 64), ("accumulate", 1), ("seq-len", 1024), ("layers", 12)):
        options.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("dim", 768), ("heads", 12), ("steps", 60), ("warm", 20)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1337)
    source = module_of(given.nanogpt)
    shape = {"n_layer": given.layers, "n_head": given.heads, "n_embd": given.dim}
    config = source.GPTConfig(
        block_size=given.seq_len, vocab_size=VOCAB, dropout=0.0, bias=False, **shape
    )
    raw = source.GPT(config).cuda()
    multiplied = sum(p.numel() for p in raw.parameters() if p.ndim == 2)
    multiplied -= raw.transformer.wpe.weight.numel()
    model = _ddp(raw) if given.how == "ddp" else _fsdp(raw)
    optimizer = raw.configure_optimizers(0.1, LEARNING_RATE, (0.9, 0.95), "cuda")
    context: Any = nullcontext()
    if given.how == "ddp":
        context = torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(VOCAB, (8, given.accumulate, given.rows, given.seq_len + 1), device="cuda")

    def step(number: int) -> Tensor:
        loss = torch.zeros((), device="cuda")
        for at, batch in enumerate(ids[number % len(ids)]):
            last = at + 1 == given.accumulate
            if given.how == "ddp":
                model.require_backward_grad_sync = last  # as in nanoGPT's loop
            with context:
                _, loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
                loss = loss / given.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    seconds, began = [], 0.0
    for number in range(given.steps):
        timed = number >= given.warm
        if number <= given.warm or number + 1 == given.steps:
            torch.cuda.synchronize()
        began = time.perf_counter() if number <= given.warm else began
        loss = step(number)
        if not timed:
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    torch.cuda.synchronize()
    count = given.steps - given.warm
    seconds += [(time.perf_counter() - began) / count] * count  # timed together, without waiting
    peak = torch.tensor(torch.cuda.max_memory_allocated(), device="cuda")
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        flops = 6 * multiplied + 12 * given.layers * given.dim * given.seq_len
        figures = {
            "step_seconds": [round(one, 5) for one in seconds],
            "peak_gib": round(int(peak) / 2**30, 2),
            "loss": round(float(loss) * given.accumulate, 4),
            "flops_per_token": flops,
        }
        print("\n" + json.dumps(figures), flush=True)
    dist.destroy_process_group()


def _ddp(raw: Any) -> Any:
    """Compile the whole model, and average its gradients over processes."""
    return DistributedDataParallel(
        torch.compile(raw, dynamic=False), device_ids=[torch.cuda.current_device()]
    )


def _fsdp(raw: Any) -> Any:
    """Shard the weights by block; each block is compiled by itself."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in raw.transformer.h:
        block.compile(dynamic=False)
        fully_shard(block, mp_policy=policy)
    return fully_shard(raw, mp_policy=policy)


if __name__ == "__main__":
    main()
