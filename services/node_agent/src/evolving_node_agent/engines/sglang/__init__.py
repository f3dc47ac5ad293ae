"""The symmetric SGLang engine: both phases in one process, KV that moves between any two nodes.

`engine.py` is what the node agent holds; it imports neither torch nor sglang. `host/` is the engine process.
"""

from .config import SglangConfig
from .engine import SglangEngine

__all__ = ["SglangConfig", "SglangEngine"]
