"""Metrics as local `evaluate` modules: each file stands alone, so `evaluate.load("training/metrics/chrf.py")` works
offline as well as the class does. All take raw text and one or several references a line; every result holds
`score` in per cent and a `signature` that says how it was counted."""
