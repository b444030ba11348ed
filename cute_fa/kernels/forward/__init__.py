"""Attention forward on sm_90a: one producer warp, two or three consumer warpgroups, TMA and warpgroup MMA."""
