"""`isojax bench`: speeds with their bars, as tables, JSON and plots. See docs/benchmarking.md."""
