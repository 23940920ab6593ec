"""Computes norms of examples and their clipped sums from the results of backpropagation.

For a layer `y = x w`, the gradient of an example is the product of its inputs `x` and the
cotangents `dy` of its outputs. The norm of the gradient is computed from these factors without the
gradient.
"""
