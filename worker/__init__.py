"""One rank of a model: spec, plan, state arena, decoder, step loop.

This file imports nothing, so that the plan and the command line stay free of torch.
"""
