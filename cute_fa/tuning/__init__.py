"""From a problem to a configuration, in plain Python: what a call must compute and move, and what a CTA can hold."""
