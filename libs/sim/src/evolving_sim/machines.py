"""Nodes like those of the paper's runs: four GB300 GPUs each, tensor parallel over them.

The paper gives no coefficients. Four numbers are fitted to five of static SGLang's (`Fitted`, paper/calibration.py),
nothing to results of Evolving Infra, Dynamo or any other system. The rest is set by hand before, from the paper's text
and what is public of the models and the hardware. They are of the scale of such hardware, no measurement of it.

Decode, GLM-5.2: §4.2 gives iterations of 17 ms for 8 running requests and 45 ms for 64. A token goes to 8 of 256
experts; speculation feeds about 4 tokens per request. d0 = 4 ms, d1 = 15.4 ms, d2 = 0.4 ms meet both. Context length
is left out, as the paper leaves it out. t_acc = 2.2 of the 4 is assumed: the paper tells how long answers take, not how
many tokens they have, so mixes.py counts them in iterations, at 2.2 tokens each; only the time per token depends on it.

Prefill, GLM-5.2: Table D.5's 4.62 requests/s of SGLang on four nodes, 23.6 % idle, are 0.66 s per request, which has
7,660 new tokens after 142,000 cached ones (Table 8, SGLang). c1 = 42 µs and c2 = 0.29 ns share it evenly, which is a
guess; sparse attention still reads an index of every pair. *One factor on both is fitted*.
c0 is a guess of a small term; c3 is host memory read at 100 GB/s.

Kimi K2.6: d1 = 21 ms, as it has a third more weights, in 384 experts. It computes with four fifths of the weights per
token, hence c1 = 34 µs, and has dense attention, with about 8 times the work per pair: c2 = 2.3 ns. *One factor on both
is fitted*.

KV: a node's 1 TB of host memory holds 20 million tokens of GLM-5.2 (§4.1), hence 50 kB per token. Kimi K2.6 has 61
layers of 576 bytes (its configuration, latent KV in FP8), 35 kB per token, hence 28 million.
Device memory: 288 GB on each GPU, of which SGLang takes 0.88 for weights and KV (0.85 to 0.92 in its recipes for
GLM-5.2 on such GPUs). A quarter of the weights, quantized to NVFP4, are 116 GB of GLM-5.2 (434 GiB resident) and 148
GB of Kimi K2.6 (590 GB); every GPU keeps all KV of its node. That leaves 2.7 and 3.0 million tokens. (§4.1's "4x the
number of KV tokens that GPU memory holds" can't mean five million: they and the weights would take 366 GB.)
Fetches: 7 ms in the median of those under 16,000 tokens (§4.1), hence about 100 GB/s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving_sim.node_config import NodeConfig

ASSUMED_GLM_5_2 = NodeConfig(
    prefill=PrefillCoefficients(c0_s=0.015, c1_s=4.2e-5, c2_s=2.9e-10, c3_s=5e-7),
    decode=DecodeCoefficients(d0_s=0.004, d1_s=0.0154, d2_s=0.0004, experts_per_token=8, experts=256),
    tokens_per_request=4.0,
    accepted_tokens=2.2,
    l1_tokens=2_700_000,
)
ASSUMED_KIMI_K2_6 = NodeConfig(
    prefill=PrefillCoefficients(c0_s=0.015, c1_s=3.4e-5, c2_s=2.3e-9, c3_s=5e-7),
    decode=DecodeCoefficients(d0_s=0.004, d1_s=0.021, d2_s=0.0004, experts_per_token=8, experts=384),
    tokens_per_request=4.0,
    accepted_tokens=2.2,
    l1_tokens=3_000_000,
    l2_tokens=28_000_000,
    kv_bytes_per_token=35e3,
)
"""What is set by hand, before the fit."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What is fitted to rows of static SGLang (paper/calibration.py), and to nothing else."""

    glm_prefill: float  # GLM-5.2's c1 and c2 are so many times as large as assumed
    kimi_prefill: float  # Kimi K2.6's
    # How many times fewer tokens a node's host memory holds where it is no pool. Four GPUs keep each token (§4.1), but
    # what device memory has need not lie in host memory too.
    host_copies: float
    gateway_s: float  # until a request is routed: making tokens of 100,000 tokens' text, its way


FITTED = Fitted(glm_prefill=1.04, kimi_prefill=1.06, host_copies=3.5, gateway_s=0.7)
"""`python -m evolving_sim.paper.calibration` says how near they come."""


def _times(assumed: NodeConfig, factor: float) -> NodeConfig:
    coefficients = assumed.prefill
    scaled = replace(coefficients, c1_s=coefficients.c1_s * factor, c2_s=coefficients.c2_s * factor)
    return replace(assumed, prefill=scaled)


def glm_5_2(fit: Fitted = FITTED) -> NodeConfig:
    """A node that serves GLM-5.2."""
    return _times(ASSUMED_GLM_5_2, fit.glm_prefill)


def kimi_k2_6(fit: Fitted = FITTED) -> NodeConfig:
    """A node that serves Kimi K2.6."""
    return _times(ASSUMED_KIMI_K2_6, fit.kimi_prefill)


GLM_5_2, KIMI_K2_6 = glm_5_2(), kimi_k2_6()
