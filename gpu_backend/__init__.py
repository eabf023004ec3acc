"""The torch backend of kvstate: a device cache, a pinned host pool, and the copies between them.

Nothing is here yet. This package will hold the storage layout, the device cache, the pinned pool and its sizing, the
copier over several cuda_streams, page tables with their static plan buffers, the reads and writes of K and V, and the
transports. It will import the core's types, ops, errors and public face, never its transitions.
"""
