"""The kernels, one folder each: bundles, roles and the kernel that calls them. Plans come from `cute_fa/tuning/`."""
