"""The executable specification: `reference`, slow and obvious, and `refinement`, from the machine's view to it."""
