"""What all other rooms use: types, number formats, trees, groupings, devices."""
