"""The maker of the demo model: corpus, training, and the scores of its abilities.

This file imports nothing, so that the corpus and the scores stay free of torch.
"""
