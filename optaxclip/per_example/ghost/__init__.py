"""Norms of examples, and their clipped sum, from what backpropagation has at hand.

For a layer `y = x w`, the gradient of an example is the product of its inputs `x` and of the
cotangents `dy` of its outputs. Both are had without the gradient, and give its norm.
"""
