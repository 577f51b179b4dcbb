"""Servers around the runtime; what they know of it is ``LLM`` and what ``LLM`` returns."""
