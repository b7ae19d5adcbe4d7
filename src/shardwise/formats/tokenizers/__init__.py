"""Tokenizers and chat templates: the `Tokenizer`, where it is read from, and BPE training."""
