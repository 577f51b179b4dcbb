"""Drafters: who proposes the draft tokens of a window."""
