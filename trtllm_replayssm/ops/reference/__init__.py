"""The replay algorithms in plain torch: the specification of the kernels."""
