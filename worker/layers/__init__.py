"""The layers that the decoder is made of, each built from this rank's parameters."""
