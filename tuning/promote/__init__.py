"""`python -m tuning promote`: what a sweep decided becomes rows that minfer chooses by."""
