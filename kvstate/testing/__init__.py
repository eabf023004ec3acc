"""The kit: what checks kvstate, and any other engine, in memory."""
