"""Measurements behind the commands: parity, perplexity, training steps and load tests."""
