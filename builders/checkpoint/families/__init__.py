"""What differs between the model families: config keys, shapes, and names of stored tensors."""
