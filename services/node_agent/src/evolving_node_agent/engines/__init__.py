"""The engines behind one port."""
