"""Between our parameter tree and Hugging Face tensors."""
