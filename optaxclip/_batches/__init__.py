"""The arguments of a loss: its parameters, its batch, and the parts that a batch is cut into."""
