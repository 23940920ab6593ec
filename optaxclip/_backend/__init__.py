"""The border: what is not mathematics is done here, once, around each update."""
