"""A Hugging Face Hub for tests: real git repositories and a real LFS store behind the Hub's HTTP interface.

Read it in this order: `repos.py` (what is stored), `api.py` (the routes under `/api`), `files.py` (bytes up and down),
`cards.py` (what the Hub refuses in a README), `faults.py` (failures on demand), `__main__.py` (the process).
It binds to loopback only, knows three tokens, and has no other secrets.
"""
