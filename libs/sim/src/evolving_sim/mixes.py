"""Kinds of agents like those of the paper's runs, and how many of each run at a time.

From the tables of the paper and from recorded sessions of Claude Code (kv-cache-tester, 426 sessions, 29,467 requests).
Medians and means of the recording: 727 and 1,810 new tokens of a request that extends its context; 6.5 % of requests
change its end, by 1,288 and 25,700 tokens; 21,300 and 83,400 tokens in an agent's first prompt; 44.5 and 69 requests
per session; 11 per sub-agent.
"""

from __future__ import annotations

from dataclasses import replace

from evolving_sim.sessions import AgentKind, Spread, SubAgents

# Coding. Pauses: Table 3's 12.9 s. Outputs: the recording's spread, and the mean that Table 8's decode time gives,
# (11.2 − 4.5) s at 7.9 ms a token; the recording's own mean is half of it. New tokens are twice the recorded ones too:
# Table 8 has 5,268 per request, in prompts of 150,000. A compaction keeps 14 % (§3).
_CODING_OUTPUT = Spread(416, 848, most=16_000)
_CODING_SUB_AGENT = AgentKind(
    name="coding sub-agent",
    system_tokens=8_000,
    opening_tokens=Spread(4_000, 8_000, most=50_000),
    new_tokens=Spread(1_454, 3_620, most=100_000),
    output_tokens=_CODING_OUTPUT,
    think_s=Spread(2.0, 4.0, most=30.0),
    turns=Spread(10, 11, most=25),
    context_tokens_max=200_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
)
CODING = AgentKind(
    name="coding",
    system_tokens=20_000,
    opening_tokens=Spread(21_300, 83_400, most=300_000),
    new_tokens=Spread(1_454, 3_620, most=100_000),
    output_tokens=_CODING_OUTPUT,
    think_s=Spread(7.0, 12.9, most=300.0),
    turns=Spread(44.5, 69, most=500),
    context_tokens_max=300_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
    rewrite_share=0.065,
    rewritten_tokens=Spread(1_288, 25_700, most=200_000),
    sub_agents=SubAgents(share=0.01, count_max=4, kind=_CODING_SUB_AGENT),
)

# Mathematics. Pauses: Table 3's 10 s. Outputs of GLM-5.2: Table 5's (14.0 − 0.6) s on 2P7D are 540 iterations of the
# 24.8 ms that 17.6 requests per node take; their spread is wide (95th percentile 72.6 s). New tokens: 1.5 % of a
# prompt (Table 1's hit rate).
MATH = AgentKind(
    name="math",
    system_tokens=2_000,
    opening_tokens=Spread(800, 1_000, most=10_000),
    new_tokens=Spread(300, 500, most=10_000),
    output_tokens=Spread(330, 1_190, most=30_000),
    think_s=Spread(7.0, 10.0, most=60.0),
    turns=Spread(35, 40, most=100),
    context_tokens_max=150_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
)

# The same with Kimi K2.6, in the run whose work shifts. Table 4's 4.05 requests/s of 288 agents that pause for 10 s
# leave each request 61 s, which are 1,500 iterations of the 40 ms that 40 requests per node take.
MATH_LONG = replace(
    MATH, name="math, long", output_tokens=Spread(1_100, 3_300, most=30_000), turns=Spread(18, 20, most=60)
)

# Computer use: each step appends screenshots. Pauses: Table 3's 1.4 s. Outputs: Table 5's (24.2 − 21.6) s on one
# decode node are 121 iterations of the 21.4 ms that 11 requests take. New tokens: 6.2 % of a prompt (Table 1).
COMPUTER_USE = AgentKind(
    name="computer use",
    system_tokens=8_000,
    opening_tokens=Spread(20_000, 30_000, most=100_000),
    new_tokens=Spread(4_800, 6_000, most=40_000),
    output_tokens=Spread(180, 266, most=4_000),
    think_s=Spread(1.0, 1.4, most=20.0),
    turns=Spread(40, 50, most=150),
    context_tokens_max=200_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
)
