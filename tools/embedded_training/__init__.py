"""Parts of tools/train_embedded.py."""
