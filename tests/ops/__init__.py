"""Tests of the torch ops against the oracle, on the CPU and, marked ``gpu``, on a CUDA device."""
