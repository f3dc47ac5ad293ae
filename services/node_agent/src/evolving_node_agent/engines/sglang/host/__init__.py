"""The engine process. Two threads matter: the scheduler's, which owns the model and all KV, and the service's, an
asyncio loop that talks to the node agent and to peers. They meet in `inbox.py` only."""
