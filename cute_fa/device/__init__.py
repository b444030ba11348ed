"""Building blocks that every kernel is made of, one idea a file; they import the DSL and core, and never torch."""
