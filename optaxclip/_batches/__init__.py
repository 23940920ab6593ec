"""What a loss takes: its parameters, its batch, and the parts that a batch is cut into."""
