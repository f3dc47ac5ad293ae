"""Kinds of agents like those of the paper's runs: what it publishes of each, what follows from that, what is assumed.

From its tables, for all kinds:
- The ideal hit rate: Table 1 gives the hit rate and the share of what could be reused that was computed again, so the
  ideal is hit / (1 − lost): 99.02 to 99.04 % for Putnam in all six runs, 93.5 to 94.0 % for OSWorld (93.97 to 94.00 %
  in ours), 97.1 to 97.4 % for CC, for which Table 8 says 97.2 and 97.3 %. What is new in a prompt is the rest.
- Pauses: Table 3's T_pause.
- How many agents are neither open nor in a pause: concurrency − X · (E2E + pause) of Table 3. Putnam: none, −0.7 to
  0.7. OSWorld: 17, 16 and 17 of 128, 144 and 160. CC: −22 to −34, so 1.25 branches of each agent are at it at a time:
  sub-agents run while their agents wait, and that wait counts as a pause.
Not published: lengths of prompts and numbers of requests per agent. They are assumed, and said to be.

Outputs count in iterations of machines.py, at t_acc = 2.2 tokens each.
"""

from __future__ import annotations

from dataclasses import replace

from evolving_sim.sessions import AgentKind, Mixed, Spread, SubAgents
from evolving_sim.traced import CLAUDE_CODE_TRACE, TraceKind

# Coding as in the paper's runs (CC): recorded sessions of Claude Code, though not the paper's recording. Of its 29,467
# requests, beside what the paper's tables say of theirs:
#                                    recorded    paper
#   new tokens, ideal                   4,204    4,200   2.75 % (Tables 1 and 8) of a prompt
#   prompt                            121,900  152,000   Table 8: uncached tokens / (1 − hit rate), 150,200 to 155,000
#   ideal hit rate                     96.5 %   97.2 %   Table 8
#   answer                                444      848   Table 8: (E2E − TTFT) / TPOT; 957 and 1,023 of the other two
#   pause                               128 s   12.9 s   Table 3, E2E of 7.9 s
#   requests of an agent                   69  301–376   Table 6: 1.0 agents/min are sustained and 1.25 are not, with
#                                                        Table 8's 6.27 requests/s
#   of sub-agents                       1.8 %    ~20 %   Table 3: 1.25 branches of an agent are at it at a time
# What computing prompts takes is alike. Changed, and fixed before any run was compared:
# - thoughts are cut to half an hour, and all are 5.1 times as fast: their mean is 12.9 s then, and the longest, 353 s,
#   are like the wait of 359 s that §3 tells of. Uncut, they would take longer to come to their mean than the runs take;
# - answers are 1.9 times as long. Of them later prompts hold as much as recorded, so that new tokens stay as they are:
#   a model that thinks says more than comes back.
# And for runs that are to load a cluster like the paper's:
CLAUDE_CODE = TraceKind("claude code", CLAUDE_CODE_TRACE, think_s_max=1800.0, compression=5.1, output_scale=1.9)
AGENTS_PER_CODING_AGENT = 1.25
"""So many recorded agents at a time for one of the paper's, whose sub-agents run beside it; see above."""
ARRIVALS_PER_CODING_AGENT = 6.0
"""So many recorded sessions stand for one agent of the paper that arrives. *Fitted* to static SGLang where 1.0 arrive a
minute (Table 6, median E2E; paper/calibration.py). 4.9 of them make as many requests, 338, amid 301 and 376; but they
come one by one, and load a cluster more evenly than one agent with its sub-agents does."""

# Coding, drawn: where a run must not take recorded sessions one by one, but agents alike in the mean.
# Pauses: Table 3's 12.9 s. Outputs: the recording's spread, and the mean that Table 8's decode time gives,
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

# Mathematics (Putnam), GLM-5.2. Published: pauses of 10 s, 0.98 % of prompts new.
# Outputs: Table 5's (14.0 − 0.6) s on 2P7D are 540 iterations of the 24.8 ms that 17.6 requests per node take. The 95th
# percentile of E2E, 72.6 s, is 5.4 times that mean, more than any log-normal has: one answer in ten is a long one.
# Prompts of 32,000 tokens, assumed: Table 5's SGLang serves 224 agents from two prefill nodes and recomputes next to
# nothing, and its nodes' host memory holds less than six million tokens each (machines.py), so all agents have less
# than twelve millions. Prompts grow by 1,490 tokens, so an agent makes 40 requests. What all agents begin with is less
# than three tenths of a first prompt: see computer use, below.
MATH = AgentKind(
    name="math",
    system_tokens=500,
    opening_tokens=Spread(2_000, 2_500, most=10_000),
    new_tokens=Spread(190, 300, most=5_000),
    output_tokens=Mixed(Spread(400, 600, most=4_000), Spread(6_300, 6_500, most=30_000), rare_share=0.1),
    think_s=Spread(7.0, 10.0, most=60.0),
    turns=Spread(35, 40, most=80),
    context_tokens_max=380_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
)

# The same with Kimi K2.6, in the run whose work shifts (§5.4). Table 4's 4.05 requests/s of 288 agents that pause for
# 10 s leave each request 61 s, which are 1,500 iterations of the 40 ms that 40 requests per decode node take. (The
# run's mean E2E, 38.7 s, is less than its throughputs and concurrencies allow by Little's law; throughputs are kept.)
# Prompts of 60,000 tokens, assumed: five nodes of SGLang hold 288 agents. The best split of those windows is 3P6D
# (§5.4), so a prompt takes between 0.44 s and 0.74 s of a prefill node: 2,400 new tokens, assumed. Of what this model
# generates, so much may come back in another form.
MATH_LONG = replace(
    MATH,
    name="math, long",
    new_tokens=Spread(1_500, 2_400, most=40_000),
    output_tokens=Mixed(Spread(1_110, 1_660, most=11_000), Spread(17_500, 18_000, most=60_000), rare_share=0.1),
    turns=Spread(18, 20, most=40),
)

# Computer use (OSWorld), Kimi K2.6: each step appends screenshots. Published: pauses of 1.4 s, 6.0 % of prompts new.
# Outputs: Table 5's (24.2 − 21.6) s on one decode node are 121 iterations of the 21.4 ms that 11 requests take.
# Prompts of 107,000 tokens, assumed: two screenshots a step, and the oldest go once there are 200,000 tokens. What all
# agents begin with is less than the three tenths of a first prompt that make SGLang's router send it where others went:
# with more, nearly all agents came to wait at one node, and Table 5's static row, whose 95th percentile of TTFT is 1.4
# times the mean, knows no such node.
# Set-up, assumed to be what the 17 agents do that neither ask nor pause: 17/4.33 s per request of each session.
COMPUTER_USE = AgentKind(
    name="computer use",
    system_tokens=2_000,
    opening_tokens=Spread(26_000, 36_000, most=100_000),
    new_tokens=Spread(4_800, 6_000, most=40_000),
    output_tokens=Spread(180, 266, most=4_000),
    think_s=Spread(1.0, 1.4, least=0.0, most=20.0),
    turns=Spread(40, 50, most=150),
    context_tokens_max=200_000,
    compacted_share=0.14,
    compacted_tokens=10_000,
    setup_s=196.0,
)
