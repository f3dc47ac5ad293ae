"""The async shell every service shares. README.md beside this file says what is where."""

import os

# grpc's C core writes plain text to stderr by itself, which would break the JSON lines; what matters is raised anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
