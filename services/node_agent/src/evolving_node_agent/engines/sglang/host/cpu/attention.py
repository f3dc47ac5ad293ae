"""Attention over the new queries only.

Upstream's `torch_native` extend pads the queries to the whole context, so 14 new tokens on 1,500 cached ones cost
as much as 1,514 new ones. Prefix reuse would then not show in the time to first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def adapt() -> None:
    """Replace the extend step of SGLang's `torch_native` backend."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    upstream = TorchNativeAttnBackend._run_sdpa_forward_extend
    TorchNativeAttnBackend._run_sdpa_forward_extend = _new_queries_only(upstream)


def _new_queries_only(upstream: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def extend(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """query, output: (new tokens, heads, dim); caches: (slots, KV heads, dim); the rest: (requests,)."""
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or not causal or windowed:
            return upstream(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        start = 0
        rows = zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
            strict=True,
        )
        for row, length, prefix, new in rows:
            slots = req_to_token[row, :length]
            keys = k_cache[slots].transpose(0, 1).unsqueeze(0).to(query.dtype)
            values = v_cache[slots].transpose(0, 1).unsqueeze(0).to(query.dtype)
            queries = query[start : start + new].transpose(0, 1).unsqueeze(0)
            # Row i of the new queries stands at position prefix + i and sees every position up to its own.
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(prefix) if prefix else None
            mixed = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=not prefix, scale=scaling, enable_gqa=enable_gqa
            )
            output[start : start + new] = mixed.squeeze(0).transpose(0, 1)
            start += new
        return output

    return extend
