"""What a compiled step depends on: two plans that agree in it can share one."""

from __future__ import annotations

import json

from minillm_core.plan import Plan

__all__ = ["graph_of"]


def graph_of(plan: Plan) -> str:
    """The plan without the numbers that its step gets as inputs, and with the sizes that it bakes in.

    Learning rates, schedules and the number of steps are inputs; staged values are not.
    """
    data, train = plan.data(), plan.config.train
    options = {one.name: one.options for one in plan.plugins}
    kept = {
        "model": data["model"],
        "optimizer": data["optimizer"],
        "sizes": [train.rows, train.accumulate > 1, train.seq_len, plan.fields],
        "bound": [train.dtype, train.compile, train.checkpointing, plan.config.kernels],
        "kernels": [[who, one.op, one.name, options[who]] for who, one in plan.candidates],
        "values": {
            name: schedule.data() if name in plan.staged else None
            for name, (_, schedule) in sorted(plan.schedules.items())
        },
    }
    return json.dumps(kept, sort_keys=True)
