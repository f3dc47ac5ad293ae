"""The async shell every service shares. README.md beside this file says what is where."""

import os

# grpc's C core writes to stderr by itself, for example at every connection a peer closes; errors are enough.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
