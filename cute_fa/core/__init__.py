"""Facts that every other room may use: errors, environment, hardware, dtypes, masks, problems. No torch, no DSL."""
