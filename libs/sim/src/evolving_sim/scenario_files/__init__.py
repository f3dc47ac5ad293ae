"""A run in one TOML file: what its keys mean, how it is read, and examples."""
