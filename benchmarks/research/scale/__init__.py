"""Whether what the study found of small networks holds at 30 to 100 times their size."""
