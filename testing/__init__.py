"""What tests, benchmarks, tools and pictures share: stand-ins, recordings played, real programs."""
