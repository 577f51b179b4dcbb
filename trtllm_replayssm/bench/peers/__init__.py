"""Other libraries' kernels for the same work, measured beside ours where they can be imported."""
