"""An engine without a model: for tests of the control plane, fault injection and overhead benchmarks.

| module | one line |
|---|---|
| engine.py | `MockEngine`, the whole port over lives that start, crash and stop |
| life.py | one incarnation: the iteration loop, its legs and its server |
| plan.py | what the next iteration computes |
| jobs.py | whether a job is possible, what it draws, when it ends |
| context.py | the KV of one leg: shared blocks, then pages of its own |
| status.py | what an engine says of itself |
| legs.py | the state of one prefill or decode leg |
| readers.py | those who follow the engine's KV events and status |
| cache.py | the node's pool, its bytes, KV events |
| model.py | KV bytes from block names, tokens from KV bytes |
| transport.py | checksummed frames over TCP, and what engines say to one another in them |
| rendezvous.py | where decode legs find their prefill legs |
| transfer.py | prefill to decode transfer, both ends |
| admission.py | which prefill legs leave the queue |
| fetching.py | what a leg gets from peers, how long it is held up for it |
| fetch.py | reading peers' L2, both ends |
| faults.py | crashes, stalls, slow links and flipped bits, on demand |
| config.py | sizes, timing, faults |
"""

from evolving_node_agent.engines.mock.config import FaultPlan, MockConfig
from evolving_node_agent.engines.mock.engine import MockEngine
from evolving_node_agent.engines.mock.faults import Faults

__all__ = ["FaultPlan", "Faults", "MockConfig", "MockEngine"]
