"""Models: files, tokenizers, chat templates, and one module an architecture."""
