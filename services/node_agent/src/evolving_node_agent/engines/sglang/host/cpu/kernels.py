"""A pure-torch stand-in for the CUDA-only `sgl_kernel` package: the operators a Llama-class model needs on CPU.

Any other operator raises on its first call, naming itself, so that nothing is silently wrong.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

PACKAGE = "sgl_kernel"


class _Missing:
    """An operator without a CPU form: importable, never callable."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no CPU stand-in")

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _StandIn(types.ModuleType):
    """A module whose unknown attributes are missing operators."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers for the package and every submodule of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == PACKAGE or fullname.startswith(PACKAGE + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        if spec.name == PACKAGE:
            module.__dict__.update(__version__="0.0.0", assign_req_to_token_pool_cpu=_assign_req_to_token_pool)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Everything was set in `create_module`."""


def _assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new slots, [start, end), into its row. out_cache_loc: (sum of lengths,)."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        new = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = new.to(req_to_token.dtype)
        taken += end - start


def _copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy token rows between pools of equal layout. Each layer: (slots, heads, dim)."""
    src, dst = src_indices.long(), dst_indices.long()
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst] = source[src]


def _device_to_host_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Back up all layers into page-first blocks.

    src_ptrs: K layers, then V layers, each (slots, heads, dim). dst_ptrs: one block for K, one for V, each
    (pages, layers, page_size, heads, dim).
    """
    layers = len(src_ptrs) // len(dst_ptrs)
    slots = src_indices.long().view(-1, page_size)
    pages = dst_indices.long()[::page_size] // page_size
    for index, source in enumerate(src_ptrs):
        dst_ptrs[index // layers][pages, index % layers] = source[slots]


def _host_pages_to_device_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load one layer from page-first blocks: the inverse of `_device_to_host_pages`."""
    pages = src_indices.long()[::page_size] // page_size
    slots = dst_indices.long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[slots] = source[pages, layer_id].flatten(0, 1)


def install() -> None:
    """Make `sgl_kernel` importable, and torchvision importable beside a CPU build of torch."""
    if importlib.util.find_spec(PACKAGE) is None:
        sys.meta_path.append(_Finder())
    _define_torchvision_operators()


_operators: list[Any] = []  # torch drops a library's definitions when the object dies


def _define_torchvision_operators() -> None:
    """torchvision's CUDA wheel registers fake kernels for operators that its missing C++ part should define."""
    if _operators or "torchvision" in sys.modules:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _operators.append(library)


def adapt_host_copies() -> None:
    """Give SGLang's host pools the copies above in place of its CUDA kernels."""
    from sglang.srt.mem_cache.pool_host import mha

    mha.transfer_kv_direct = _copy_layers
    mha.transfer_kv_all_layer_direct_lf_pf = _device_to_host_pages
    mha.transfer_kv_per_layer_direct_pf_lf = _host_pages_to_device_layer
