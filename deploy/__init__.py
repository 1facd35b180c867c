"""What a person starts: command line, Serve application, image contents and demo model.

This file imports nothing.
"""
