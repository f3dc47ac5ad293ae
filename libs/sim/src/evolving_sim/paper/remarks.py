"""Where simulated values part from the paper's, and why: written by people who looked at the whole run.

By table and row of `tables.json`; row "" is about the table as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

REMARKS: Mapping[tuple[str, str], str] = {
    ("§2.1, §2.2", ""): (
        "Dynamo's planner ends on the paper's split only with all KV that decode nodes hold taken for their "
        "utilisation. Arrow goes to 8P1D at once and stays, so that it loses little KV; the bursts of sub-agents that "
        "turned it 34 times in the paper do not turn it here."
    ),
    ("§2.3", ""): (
        "The pool that is read when prefill starts is the best here and the worst in the paper. Contexts of "
        "150,000 tokens are 7.5 GB, which take 0.3 s at 100 GB/s for four GPUs; the paper's must have been read "
        "many times slower, and it doesn't say from where. Sticky sessions and cache affinity are too near to "
        "each other to be ranked by one run."
    ),
    ("Table 3", ""): (
        "Ours is within a tenth of the paper's, but for 126 coding agents and Putnam, where it is up to a fifth "
        "faster. Dynamo is near the paper's with computer use and 108 coding agents. It collapses where its planner "
        "leaves nodes to prefill whose host memory is too small for what all agents need: with 90 coding agents it is "
        "on 2P7D after 36 minutes, and for Putnam it goes on to 1P8D, where the paper's made two or three switches."
    ),
    ("Table 5", ""): (
        "SGLang's best split of OSWorld is 8P1D here and 6P3D in the paper, although 6P3D serves what it was "
        "fitted to. That decode nodes reserve room first keeps it back there, but not enough; what else does we "
        "don't know. Of 90 coding agents the best split of ours is 4P5D here, 1.6 % before 3P6D, hence its shorter "
        "waits."
    ),
    ("Table 6", ""): (
        "At the lowest rate medians are within a fifth of the paper's. Sessions that arrive are recorded ones, and so "
        "many as make the paper's requests on average: from 0.75 a minute on they load the cluster less than the "
        "paper's agents do, and at 1.5 SGLang's host memory is full at once, where the paper's waits grow slowly."
    ),
    ("Table 8", ""): (
        "Of SGLang's row throughput and lost reuse are fitted; TTFT and E2E are not, and are within a fifth. Ours "
        "serves a tenth more than the paper's: it loses 0.01 % of reuse and not 0.7 %."
    ),
    ("Table D.5", ""): "Fetches under the queue wait help a little more than in the paper.",
    ("§5.5", ""): (
        "All four first splits lead to 4P5D, as in the paper; mean E2E differs by 2.8 %, though all are there when the "
        "hour that counts begins. At 256 GPUs Dynamo moves one of 64 nodes at a time, each for some minutes, and has "
        "more prefill nodes left at the end than its agents need; the paper's P95 of 418 s can't come about so."
    ),
}
