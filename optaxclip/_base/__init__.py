"""What everything stands on: types, number formats, trees, devices."""
