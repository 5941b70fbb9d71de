"""What can be done with session files without running them: look, check, compare, convert.

Every tool opens a `kv.session.reading.SessionFile`, which is verified as a whole before anything of
it is believed. Rows are read in pieces, so no file has to fit in memory. `proving` and `advice` are
the two that load a model.
"""
