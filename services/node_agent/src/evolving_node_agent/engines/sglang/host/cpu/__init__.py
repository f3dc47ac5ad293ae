"""What SGLang lacks on a machine without CUDA, and nothing else.

Upstream's CPU engine wants a compiled kernel package that exists for CUDA (and AMX builds) only. A Llama-class model
on `torch_native` attention needs three small pieces of it, and host pools that neither pin memory nor use streams.
`install` must run before the first `sglang` import; `adapt` after it, when SGLang's own modules can be changed.
"""

from __future__ import annotations

import os

from . import attention, kernels, sampling, streams


def install() -> None:
    """Provide `sgl_kernel` and torchvision's missing operators. Idempotent; only where CUDA is absent."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Compiling a sampler's ten lines takes half a minute of the scheduler's thread.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    kernels.install()
    streams.install()


def adapt() -> None:
    """Change SGLang's modules for a device without streams or pinned memory. After `install`."""
    streams.adapt_host_pools()
    kernels.adapt_host_copies()
    attention.adapt()
    sampling.adapt()
