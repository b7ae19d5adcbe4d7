"""Hugging Face folders: config.json, safetensors files and quantized matrices, read and written."""
