"""A session file: the tables of a store, its written cells, and bytes of the host (contract 8).

`docs/session-format.md` says what stands where. `header` and `tables` turn values into bytes and
back, `writing` makes a file, `reading` verifies one, `loading` puts it into a store.
"""
