"""The command of `python -m optaxclip`."""
