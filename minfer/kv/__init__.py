"""The cell store: which cells belong to whom, and the bytes in them (contract 5)."""
