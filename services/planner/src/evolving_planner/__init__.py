"""Evolving Infra planner: owns the split of prefill and decode nodes."""
