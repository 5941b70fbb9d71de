"""`python -m tuning compare`: promoted rows beside the defaults."""
