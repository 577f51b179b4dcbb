"""Executors, slots, the decode loop, sampling and speculative decoding behind ``LLM``."""
