"""What all other packages use: types, number formats, trees, groupings."""
