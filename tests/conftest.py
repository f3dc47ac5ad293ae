"""What every area shares: fixtures, and properties that take as long as a busy machine needs."""

from hypothesis import settings

settings.register_profile("evolving", deadline=None)
settings.load_profile("evolving")

pytest_plugins = ["etcd_process"]
