"""The pictures of the documentation: each is measured and drawn by one module."""
