"""Snapshots of prompts that were run: a prompt that begins with one goes on from there."""
