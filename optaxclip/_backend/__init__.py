"""Handles devices, meshes, memory spaces, platforms, and sparse leaves."""
