"""Fixtures every area shares."""

pytest_plugins = ["etcd_process"]
