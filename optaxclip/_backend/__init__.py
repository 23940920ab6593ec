"""Handles devices, meshes, memories, platforms and sparse leaves, once for each update."""
