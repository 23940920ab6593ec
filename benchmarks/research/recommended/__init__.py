"""Compares candidates for the line that the README recommends, as `../recommended.md` defines."""
