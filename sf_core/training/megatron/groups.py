"""How the ranks of a gang divide a policy among themselves: tensor-parallel ranks are neighbours, then come
the data-parallel ones, then the stages of the pipeline.

Megatron is given these groups and keeps no list of its own (`parallel_state`), so nothing of it is left when
the gang parts and torch.distributed's groups are closed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from sf_core.training.torch.ranks import Ranks

Parts = tuple[tuple[int, ...], ...]
"""The ranks of each group."""


def make_groups(
    ranks: Ranks, device: torch.device, tensor_parallel: int, pipeline_parallel: int
) -> ProcessGroupCollection:
    """The groups of this rank. All ranks must call it at once."""
    all_ranks = ranks.mesh(device.type).get_group()
    grid = torch.arange(ranks.size).view(pipeline_parallel, -1, tensor_parallel)
    groups_by_parts: dict[Parts, Any] = {}

    def own_group(parts: torch.Tensor) -> Any:
        """This rank's group of those in the rows of a matrix."""
        key = tuple(map(tuple, parts.tolist()))
        is_one_group = len(parts) == 1
        has_all_ranks = parts.numel() == ranks.size
        if is_one_group and has_all_ranks:
            return all_ranks
        if key not in groups_by_parts:
            groups_by_parts[key] = _make_subgroups(key, all_ranks, device)
        return groups_by_parts[key]

    tensor = own_group(grid.flatten(0, 1))
    data = own_group(grid.transpose(1, 2).flatten(0, 1))
    stages = grid.permute(1, 2, 0).flatten(0, 1)
    # those that may share an embedding
    ends = stages[:, [0, -1]] if pipeline_parallel > 1 else stages
    alone = own_group(grid.view(-1, 1))
    return ProcessGroupCollection(
        tp=tensor,
        tp_cp=tensor,
        pp=own_group(stages),
        mp=own_group(grid.transpose(0, 1).flatten(1)),
        embd=own_group(ends),
        dp=data,
        dp_cp=data,
        expt_dp=data,
        intra_dist_opt=all_ranks,
        cp=alone,
        ep=alone,
        pos_embd=alone,
    )


def _make_subgroups(parts: Parts, all_ranks: Any, device: torch.device) -> Any:
    timeout = all_ranks._get_backend(device).options._timeout
    backend = "nccl" if device.type == "cuda" else "gloo"
    own, _ = dist.new_subgroups_by_enumeration([list(part) for part in parts], timeout, backend)
    return own
