"""`python -m tuning compile`: every kernel of the CUDA backend, compiled without a GPU.

offline  launches that only compile. calls  small inputs of every op. usage  what a kernel takes of
a multiprocessor. command  the options, the report.
"""
