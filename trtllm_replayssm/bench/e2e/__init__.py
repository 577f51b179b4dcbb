"""Whole models under load: random weights of true shapes, replay beside the conventional decode."""
