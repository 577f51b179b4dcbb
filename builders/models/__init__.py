"""Whole models, composed of layers; parameter names are the rank checkpoint's keys."""
