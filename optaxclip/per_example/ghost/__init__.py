"""Norms of examples, and their clipped sum, from what backpropagation computes anyway.

For a layer `y = x w`, the gradient of an example is the product of its inputs `x` and the
cotangents `dy` of its outputs. These two give the norm of the gradient without the gradient.
"""
