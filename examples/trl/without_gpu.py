"""Lets TRL's AsyncGRPOTrainer train on a machine without a GPU, slowly: call `do_without_gpu` before the trainer is made.

TRL takes two things of a GPU for granted: its name, to know how fast it could be, and a kernel for attention. TRL lays samples out as
a tree, in which a prompt that several share stands once; every segment of the tree attends to the tokens on the path to
it (`tree_kv_index`), and to its own up to each token. Here the same is computed in plain torch.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION


def do_without_gpu() -> None:
    """Replace what needs one."""
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    async_grpo_trainer.register_tree_attention = _register


def _register() -> None:
    AttentionInterface.register(TREE_ATTENTION, plain_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **kwargs: None)


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """[1, heads, tokens, width] to [1, tokens, heads, width], one segment after the other."""
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    queries, paths = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    out = torch.empty_like(query)
    for segment in range(len(queries) - 1):
        own = slice(queries[segment], queries[segment + 1])
        path = tree_kv_index[paths[segment] : paths[segment + 1]]
        length, reach = own.stop - own.start, len(path)
        visible = torch.ones(length, reach, dtype=torch.bool, device=query.device).tril(reach - length)
        out[:, :, own] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, own], key[:, :, path], value[:, :, path], attn_mask=visible, scale=scaling
        )
    return out.transpose(1, 2), None
