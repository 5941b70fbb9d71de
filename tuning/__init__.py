"""Measuring minfer. Nothing in `minfer` imports this package."""
