"""The commands of `python -m optaxclip`, one file each."""
