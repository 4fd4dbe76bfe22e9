"""A block of ranks that trains one trial after another, and the trial as the objective sees it."""
