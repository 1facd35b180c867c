"""The OpenAI-compatible HTTP surface. It checks requests and makes text; it knows no tensors."""
