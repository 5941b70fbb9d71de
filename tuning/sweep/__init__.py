"""`python -m tuning sweep`: experiments on kernel variants."""
