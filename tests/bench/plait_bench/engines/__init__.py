"""One module per engine; each runs in a process, and where it needs to a virtual environment, of
its own, and has a `create(options)` that loads a model.
"""
