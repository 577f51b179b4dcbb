"""Reading Hugging Face folders and writing rank checkpoints."""
