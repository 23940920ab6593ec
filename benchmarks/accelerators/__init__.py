"""What a clip costs on accelerators, by what their compilers make of it."""
