"""Model files of other programs: Hugging Face folders, GGUF files, tokenizers, and checkpoints of
runs.

`catalogue` resolves a model's name, `families` has one record per family of models, `load` opens
weights, `reader` reads the shards of a rank, and `convert` writes a folder.
"""
