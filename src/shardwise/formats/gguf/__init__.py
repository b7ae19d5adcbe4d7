"""GGUF files of llama.cpp: headers, configs, weights and tokenizers, read and written."""
