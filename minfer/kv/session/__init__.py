"""A session file: the tables of a store, its written cells, and bytes of the host (contract 8).

`docs/session-format.md` says what stands where. `header` and `tables` turn values into bytes and
back, `pieces` cuts the rows. `writing` makes a file and `reading` verifies one, without a store;
`saving` and `loading` do so for a store. `identity` says whom a session belongs to, `host` what an
engine keeps in the host's bytes.
"""
