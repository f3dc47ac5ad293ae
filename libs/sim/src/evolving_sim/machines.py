"""Nodes like those of the paper's runs: four GB300 GPUs each, tensor parallel over them.

The paper gives no coefficients. These follow from its tables by Little's law, in round numbers, and were fixed before
any split was searched with them; they are of its scale, no measurement of such hardware.

Decode, GLM-5.2: §4.2 gives iterations of 17 ms for 8 running requests and 45 ms for 64. A token goes to 8 of 256
experts; speculation feeds about 4 tokens per request. d0 = 4 ms, d1 = 15.4 ms, d2 = 0.4 ms meet both. Context length
is left out, as the paper leaves it out. t_acc: Table 8's 7.9 ms per token, against the 17 ms of the 8.4 requests that
a decode node has there (6.27/s · (11.2 − 4.5) s / 5), is 2.2.

Prefill, GLM-5.2: Table 8's 6.27 requests/s on four nodes, 14 % idle (Table D.5), are 0.55 s per request, of 5,268 new
tokens after 150,000 cached ones (96.6 % hit). c1 = 55 µs and c2 = 0.25 ns (sparse attention) share it about evenly;
c0 and c3 are guesses of small terms.

Kimi K2.6 has a third more weights in 384 experts, hence d1 = 21 ms, and dense attention: Table 5's 4.33 requests/s on
eight prefill nodes of OSWorld are 1.85 s per request, which c2 = 2 ns gives for 6,800 new tokens after 110,000.

KV: a node's 1 TB of host memory holds 20 million tokens (§4.1), hence 50 kB per token; device memory a quarter of that.
Fetches: 7 ms in the median of those under 16,000 tokens (§4.1), hence about 100 GB/s.
"""

from __future__ import annotations

from evolving.core.timemodel import DecodeCoefficients, PrefillCoefficients
from evolving_sim.node_config import NodeConfig

GLM_5_2 = NodeConfig(
    prefill=PrefillCoefficients(c0_s=0.015, c1_s=5.5e-5, c2_s=2.5e-10, c3_s=5e-7),
    decode=DecodeCoefficients(d0_s=0.004, d1_s=0.0154, d2_s=0.0004, experts_per_token=8, experts=256),
    tokens_per_request=4.0,
    accepted_tokens=2.2,
)

KIMI_K2_6 = NodeConfig(
    prefill=PrefillCoefficients(c0_s=0.015, c1_s=5e-5, c2_s=2e-9, c3_s=5e-7),
    decode=DecodeCoefficients(d0_s=0.004, d1_s=0.021, d2_s=0.0004, experts_per_token=8, experts=384),
    tokens_per_request=4.0,
    accepted_tokens=2.2,
)
