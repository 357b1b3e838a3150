"""Records of runs in, a judged comparison out. Pure: no torch, no tracking store, no clocks."""
