"""What tests, benchmarks and `cute-fa gradcheck` share: inputs, an independent oracle, the accuracy rule. Never used by a call."""
