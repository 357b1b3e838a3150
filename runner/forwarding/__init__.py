"""From a run folder to a tracking store, outside the training process; no store by name.

address: which stores are accepted, and whether one answers. names: names and values as a store
takes them. curves: journal lines as points. state: what is forwarded and how far it came.
forwarder: one call at a time. follower: the thread that makes the calls. client: the calls a
store offers. runs: what a run says there. store: all of it, as the launching process uses it.
"""
