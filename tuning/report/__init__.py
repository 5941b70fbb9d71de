"""`python -m tuning report`: what the database of a sweep tells, as text, JSON and pictures."""
