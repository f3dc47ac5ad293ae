"""Where simulated values part from the paper's, and why: written by people who looked at the whole run.

By table and row of `tables.json`; row "" is about the table as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping

REMARKS: Mapping[tuple[str, str], str] = {
    ("§2.1, §2.2", ""): (
        "Dynamo's planner ends on the paper's split only with all KV that decode nodes hold taken for their "
        "utilisation; with the contexts that decode at a moment, which are what its release 1.5 reports, it ends "
        "on 7P2D. Arrow goes to 8P1D at once and stays, so that it loses little KV; the bursts of sub-agents that "
        "turned it 34 times in the paper do not turn it here."
    ),
    ("§2.3", ""): (
        "The pool that is read when prefill starts is the best here and the worst in the paper. Contexts of "
        "150,000 tokens are 7.5 GB, which take 0.3 s at 100 GB/s for four GPUs; the paper's must have been read "
        "many times slower, and it doesn't say from where. Sticky sessions and cache affinity are too near to "
        "each other to be ranked by one run."
    ),
    ("Table 3", ""): (
        "Ours is within a tenth of the paper's but for 126 coding agents and Putnam, where it is up to a quarter "
        "faster. Dynamo's collapses further than the paper's where its planner leaves one to three nodes to "
        "prefill: what all agents need does not fit into those nodes' host memory, and LRU loses what comes next."
    ),
    ("Table 5", ""): (
        "SGLang's best split of OSWorld is 8P1D here and 6P3D in the paper, although 6P3D serves what it was "
        "fitted to: what keeps the paper's from seven or eight prefill nodes is not in ours, and we don't know "
        "it."
    ),
    ("Table 6", ""): (
        "Half of the paper's requests have their first token in 0.7 to 1.0 s at the lowest rate; here it takes "
        "0.06 to 0.12 s. A likely reason is that what comes before prefill (reading and tokenizing 150,000 "
        "tokens) costs nothing. Sessions that arrive are recorded ones, and so many as make the paper's requests "
        "on average: they seem to load the cluster less."
    ),
    ("Table 8", ""): (
        "Nothing of SGLang's row was fitted, and its throughput and its mean latencies are within a tenth. Ours "
        "is better than the paper's: it loses 0.01 % of reuse and not 0.7 %, and first tokens come in a third of "
        "the time."
    ),
    ("Table D.5", ""): ("Fetches under the queue wait help more than in the paper, for the reason given at §2.3."),
    ("§5.5", ""): (
        "3P6D and 4P5D serve within 5 % of each other here. What ten minutes of recorded sessions need of prefill "
        "varies by more, and so two of four planners stay on 3P6D. At 256 GPUs Dynamo moves one of 64 nodes at a "
        "time, each for some minutes, and has 38 prefill nodes left at the end, which is more than its agents "
        "need; the paper's P95 of 418 s can't come about so."
    ),
}
