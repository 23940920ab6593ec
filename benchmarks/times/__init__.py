"""What a clip costs on this machine: cases, timing, report."""
