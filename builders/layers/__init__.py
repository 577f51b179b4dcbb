"""Torch modules of the layers, with explicit state arguments."""
