"""What each command does; `minfer.cli` holds the parser. Heavy imports happen inside functions."""
