"""Facts that two floors of the package must agree on: no torch, no TensorRT, no behaviour."""
