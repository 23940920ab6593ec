"""All that is not mathematics, once, around any update of ours."""
